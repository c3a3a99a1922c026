use std::borrow::Cow;
use std::panic::{catch_unwind, AssertUnwindSafe};
use std::sync::Arc;

use crate::ffi::EncodedBatch;

type Result<T> = std::result::Result<T, String>;

pub struct Tokenizer(Arc<tokenizers::Tokenizer>);

/// A broken tokenizer.json can make the crate panic far inside; C++ must see an error, not an abort.
fn guarded<T>(work: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(error)) => Err(error.to_string()),
        Err(_) => Err("the tokenizers crate panicked".to_owned()),
    }
}

pub fn open_tokenizer(json: &[u8]) -> Result<Box<Tokenizer>> {
    std::panic::set_hook(Box::new(|_| {})); // the error says it; a backtrace on stderr would be noise
    crate::outline::check(json)?;
    guarded(|| {
        let mut inner = tokenizers::Tokenizer::from_bytes(json)?;
        inner.with_padding(None);
        inner.with_truncation(None)?;
        Ok(Box::new(Tokenizer(Arc::new(inner))))
    })
}

/// Invalid UTF-8 becomes U+FFFD, one for each maximal invalid part, as Python's errors="replace" does. The limit is for
/// what comes out, which can be three times what went in.
fn decoded(text: &[u8], limit: u64) -> Result<Cow<'_, str>> {
    let decoded = if text.len() as u64 > limit { Cow::Borrowed("") } else { String::from_utf8_lossy(text) };
    let bytes = decoded.len().max(text.len());
    if bytes as u64 > limit {
        return Err(format!("a text of {bytes} bytes is too long, at most {limit} are tokenized at once"));
    }
    Ok(decoded)
}

impl Tokenizer {
    pub fn encode(&self, text: &[u8], limit: u64, special: bool) -> Result<Vec<u32>> {
        let text = decoded(text, limit)?;
        guarded(|| Ok(self.0.encode_fast(text.as_ref(), special)?.get_ids().to_vec()))
    }

    /// Text i is text[ends[i - 1] .. ends[i]]; the texts are spread over all cores.
    pub fn encode_batch(&self, text: &[u8], ends: &[u64], limit: u64, special: bool) -> Result<EncodedBatch> {
        let mut parts: Vec<Cow<str>> = Vec::with_capacity(ends.len());
        let mut begin = 0;
        for &end in ends {
            let part = text.get(begin..end as usize).ok_or("the ends of a batch do not rise")?;
            parts.push(decoded(part, limit)?);
            begin = end as usize;
        }
        let encodings = guarded(|| self.0.encode_batch_fast(parts, special))?;
        let mut batch = EncodedBatch { ids: Vec::new(), ends: Vec::with_capacity(ends.len()) };
        for encoding in encodings {
            batch.ids.extend_from_slice(encoding.get_ids());
            batch.ends.push(batch.ids.len() as u64);
        }
        Ok(batch)
    }

    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        guarded(|| self.0.decode(ids, skip_special))
    }

    /// -1 where the vocabulary has no such token.
    pub fn token_id(&self, token: &str) -> i64 {
        self.0.token_to_id(token).map_or(-1, i64::from)
    }

    /// One more than the largest id, added tokens included.
    pub fn size(&self) -> u64 {
        self.0.get_vocab(true).values().max().map_or(0, |&id| u64::from(id) + 1)
    }

    pub fn stream(&self, skip_special: bool) -> Box<TokenStream> {
        Box::new(TokenStream {
            tokenizer: self.0.clone(),
            skip_special,
            ids: Vec::new(),
            given: 0,
            given_text: String::new(),
        })
    }
}

/// A character is at most four bytes, and a token at least one of them: text that still ends in U+FFFD after this many
/// tokens does so because the bytes are wrong, not because more are to come.
const HELD_TOKENS: usize = 8;

/// Decodes token by token and holds back text until it is whole UTF-8.
pub struct TokenStream {
    tokenizer: Arc<tokenizers::Tokenizer>,
    skip_special: bool,
    ids: Vec<u32>,
    /// The first tokens of `ids` and their text are given out already: decoders look at a token's neighbours (a leading
    /// space, a joined accent), so that the new text is only what follows theirs.
    given: usize,
    given_text: String,
}

impl TokenStream {
    pub fn push(&mut self, ids: &[u32]) -> Result<String> {
        self.ids.extend_from_slice(ids);
        let text = self.decoded(0)?;
        if text.ends_with(char::REPLACEMENT_CHARACTER) && self.ids.len() - self.given <= HELD_TOKENS {
            return Ok(String::new());
        }
        self.give_out(text)
    }

    /// What was held back: the text ends within a character, so it ends with U+FFFD.
    pub fn finish(&mut self) -> Result<String> {
        let text = self.decoded(0)?;
        self.give_out(text)
    }

    fn decoded(&self, from: usize) -> Result<String> {
        guarded(|| self.tokenizer.decode(&self.ids[from..], self.skip_special))
    }

    fn give_out(&mut self, text: String) -> Result<String> {
        let same = |(a, b): &(char, char)| a == b;
        let common: usize = text.chars().zip(self.given_text.chars()).take_while(same).map(|(c, _)| c.len_utf8()).sum();
        let fresh = text[common..].to_owned();
        if self.ids.len() > self.given {
            self.given_text = self.decoded(self.given)?;
            self.ids.drain(..self.given);
            self.given = self.ids.len();
        }
        Ok(fresh)
    }
}
