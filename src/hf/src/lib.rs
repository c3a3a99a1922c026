//! Hugging Face's own tokenizers and safetensors crates, and BLAKE3, behind a C++ bridge.
//! What can fail returns a Result, which cxx turns into rust::Error; panics of the tokenizers crate are caught.

mod allocator;
mod hasher;
mod outline;
mod safetensors_header;
mod tokenizer;

use hasher::{new_hasher, Hasher};
use safetensors_header::{read_header, write_header};
use tokenizer::{open_tokenizer, Tokenizer, TokenStream};

#[cxx::bridge(namespace = "tapetune::hf::bridge")]
mod ffi {
    /// One tensor of a safetensors file; begin and end count from the start of the data.
    struct Entry {
        name: String,
        dtype: String,
        shape: Vec<u64>,
        begin: u64,
        end: u64,
    }

    struct KeyValue {
        key: String,
        value: String,
    }

    struct Header {
        data_start: u64,
        tensors: Vec<Entry>,
        metadata: Vec<KeyValue>,
    }

    /// Token ids of several texts, one after the other; text i is ids[ends[i - 1] .. ends[i]].
    struct EncodedBatch {
        ids: Vec<u32>,
        ends: Vec<u64>,
    }

    extern "Rust" {
        fn read_header(file: &[u8]) -> Result<Header>;
        fn write_header(tensors: &[Entry], metadata: &[KeyValue]) -> Result<Vec<u8>>;

        type Hasher;
        fn new_hasher() -> Box<Hasher>;
        fn update(self: &mut Hasher, bytes: &[u8]);
        fn hex(self: &Hasher) -> String;

        type Tokenizer;
        fn open_tokenizer(json: &[u8]) -> Result<Box<Tokenizer>>;
        fn encode(self: &Tokenizer, text: &[u8], limit: u64, special: bool) -> Result<Vec<u32>>;
        fn encode_batch(
            self: &Tokenizer,
            text: &[u8],
            ends: &[u64],
            limit: u64,
            special: bool,
        ) -> Result<EncodedBatch>;
        fn decode(self: &Tokenizer, ids: &[u32], skip_special: bool) -> Result<String>;
        fn token_id(self: &Tokenizer, token: &str) -> i64;
        fn size(self: &Tokenizer) -> u64;

        type TokenStream;
        fn stream(self: &Tokenizer, skip_special: bool) -> Box<TokenStream>;
        fn push(self: &mut TokenStream, ids: &[u32]) -> Result<String>;
        fn finish(self: &mut TokenStream) -> Result<String>;
    }
}
