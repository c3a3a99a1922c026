// Safetensors headers, config.json, the shard index and GGUF: any bytes are either read or refused with an Error.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "checkpoint/config.h"
#include "checkpoint/folder.h"
#include "core/error.h"
#include "core/log.h"
#include "gguf/reader.h"
#include "gguf/settings.h"
#include "gguf/tokenizer.h"
#include "hf/safetensors.h"

namespace {

void check(bool holds) {
  if (!holds) std::abort();
}

// What the rest of the program relies on once a header has been accepted.
void safetensors(std::span<const std::byte> file) {
  const tapetune::SafetensorsHeader header = tapetune::read_safetensors_header(file, "input");
  std::uint64_t last = 0;
  for (const tapetune::TensorEntry& entry : header.tensors) {
    check(entry.begin == last && entry.begin <= entry.end);
    check(header.data_start + entry.end <= file.size());
    last = entry.end;
    std::uint64_t bytes = tapetune::dtype_size(entry.dtype);
    if (bytes == 0) continue;
    for (const std::int64_t extent : entry.shape) {
      check(extent >= 0);
      bytes *= static_cast<std::uint64_t>(extent);
    }
    check(bytes == entry.end - entry.begin);
  }
}

void config(std::string_view text) {
  const tapetune::ModelConfig config = tapetune::parse_config(text, "input");
  check(config.heads > 0 && config.kv_heads > 0 && config.heads % config.kv_heads == 0);
  check(config.head_dim > 0 && config.head_dim % 2 == 0 && config.context > 0);
  check(config.rope.theta > 0 && config.rope.factor > 0);
  // What was accepted is written in a form that is accepted again and says the same.
  const std::string written = tapetune::write_config(config, "float32");
  check(tapetune::write_config(tapetune::parse_config(written, "written"), "float32") == written);
}

void gguf(std::span<const std::byte> file) {
  tapetune::set_quiet(true);  // a warning for each file without a tokenizer says nothing
  const tapetune::gguf::File parsed = tapetune::gguf::File::parse(file, "input");
  for (const auto& [name, tensor] : parsed.tensors()) {
    std::uint64_t numbers = 1;
    for (const std::int64_t extent : tensor.shape) numbers *= static_cast<std::uint64_t>(extent);
    check(tensor.bytes.size() == numbers / tensor.format->numbers * tensor.format->bytes);
    check(tensor.bytes.data() >= file.data() && tensor.bytes.data() + tensor.bytes.size() <= file.data() + file.size());
  }
  const tapetune::ModelConfig config = tapetune::gguf::read_settings(parsed);
  check(config.layers <= static_cast<std::int64_t>(parsed.tensors().size()));
  tapetune::gguf::read_tokenizer(parsed, config);
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  if (size == 0) return 0;
  const std::span<const std::byte> rest(reinterpret_cast<const std::byte*>(data) + 1, size - 1);
  const std::string_view text(reinterpret_cast<const char*>(rest.data()), rest.size());
  try {
    switch (data[0] % 4) {
      case 0:
        safetensors(rest);
        break;
      case 1:
        config(text);
        break;
      case 2:
        gguf(rest);
        break;
      default:
        tapetune::parse_index(text, "input");
    }
  } catch (const tapetune::Error&) {
    // refused, as it should be
  }
  return 0;
}
