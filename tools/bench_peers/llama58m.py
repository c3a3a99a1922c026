"""The Llama of 58M parameters that the benches train, and how transformers and PEFT train it at their best."""

from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=32000,
    hidden_size=512,
    intermediate_size=1376,
    num_hidden_layers=8,
    num_attention_heads=8,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    tie_word_embeddings=False,
    attn_implementation="sdpa",
)
LORA = LoraConfig(task_type="CAUSAL_LM", r=8, lora_alpha=16, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"])
ALSO = {"embeddings": "embed_tokens", "norms": "norm"}  # the layers' norms end so too


def add_settings(parser) -> None:
    parser.add_argument("--context", type=int, required=True)
    parser.add_argument("--checkpointing", choices=("off", "full"), required=True)
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--train-also", default="")


def with_lora(model, checkpointing: str, also: str):
    """LoRA of rank 8 on q, k, v, o, ready to train; `also` are words of ALSO between commas."""
    model = get_peft_model(model, LORA)
    # Not modules_to_save, which keeps a second copy of all it trains: this is the leaner of the two ways.
    words = [word for word in also.split(",") if word]
    for name, parameter in model.named_parameters():
        if any(name.endswith(f"{ALSO[word]}.weight") for word in words):
            parameter.requires_grad_(True)
    if checkpointing == "full":
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    return model.train()


def trained(model) -> list:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]
