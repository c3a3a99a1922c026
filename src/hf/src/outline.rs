//! What a tokenizer.json asks for, before the tokenizers crate allocates it.

use std::borrow::Cow;
use std::fmt;

use serde::de::{Deserializer, Error, SeqAccess, Visitor};
use serde::Deserialize;
use serde_json::Value;

/// Text of all added tokens: the automaton that finds them takes up to 170 bytes a byte. Llama 3 has 256 tokens with 8 kB,
/// Gemma 3 6,400 with 80 kB, a model with 131,072 image tokens 3 MB.
const MOST_ADDED: usize = 4 << 20;

#[derive(Deserialize)]
struct Outline {
    #[serde(default)]
    #[allow(dead_code)] // reading it is the check
    added_tokens: Option<AddedTokens>,
    #[serde(default)]
    normalizer: Value,
}

#[derive(Deserialize)]
struct AddedToken<'a> {
    #[serde(borrow, default)]
    content: Cow<'a, str>,
}

struct AddedTokens;

impl<'de> Deserialize<'de> for AddedTokens {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Sum;
        impl<'de> Visitor<'de> for Sum {
            type Value = AddedTokens;

            fn expecting(&self, out: &mut fmt::Formatter) -> fmt::Result {
                out.write_str("a list of added tokens")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut tokens: A) -> Result<AddedTokens, A::Error> {
                let mut bytes = 0;
                while let Some(token) = tokens.next_element::<AddedToken>()? {
                    bytes += token.content.len();
                    if bytes > MOST_ADDED {
                        return Err(A::Error::custom(format!("its added tokens have more than {MOST_ADDED} bytes")));
                    }
                }
                Ok(AddedTokens)
            }
        }
        deserializer.deserialize_seq(Sum)
    }
}

/// Fails where reading the file would take memory out of all proportion to its size.
pub fn check(json: &[u8]) -> Result<(), String> {
    let outline: Outline = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    check_charsmaps(&outline.normalizer)
}

fn check_charsmaps(value: &Value) -> Result<(), String> {
    match value {
        Value::Object(members) => members.iter().try_for_each(|(key, member)| match member {
            Value::String(text) if key == "precompiled_charsmap" => check_charsmap(text),
            _ => check_charsmaps(member),
        }),
        Value::Array(items) => items.iter().try_for_each(check_charsmaps),
        _ => Ok(()),
    }
}

/// In base64: the size of a trie in four bytes, the trie, the texts. The crate makes room for the size before it looks at
/// what is there.
fn check_charsmap(base64: &str) -> Result<(), String> {
    let padding = base64.bytes().rev().take_while(|&c| c == b'=').count();
    let bytes = (base64.len() - padding) * 3 / 4;
    let mut first = 0u64;
    for c in base64.bytes().take(6) {
        first = first << 6 | u64::from(sextet(c).ok_or("its precompiled_charsmap is not base64")?);
    }
    if bytes < 4 {
        return Err("its precompiled_charsmap is empty".to_owned());
    }
    let trie = ((first >> 4) as u32).swap_bytes() as usize; // 36 bits, of which the first 32 are a little-endian number
    if trie > bytes - 4 {
        return Err(format!("its precompiled_charsmap has {bytes} bytes, but says that {trie} of them are a trie"));
    }
    Ok(())
}

fn sextet(c: u8) -> Option<u8> {
    match c {
        b'A'..=b'Z' => Some(c - b'A'),
        b'a'..=b'z' => Some(c - b'a' + 26),
        b'0'..=b'9' => Some(c - b'0' + 52),
        b'+' => Some(62),
        b'/' => Some(63),
        _ => None,
    }
}
