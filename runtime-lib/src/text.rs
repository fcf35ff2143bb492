//! Text to token ids and back: the tokenizer in a compact form that loads in a few milliseconds.
//!
//! In: `tokenizer.json` at build ([`compact()`]), the compact bytes at start ([`Text::load`]). Out: ids, text, and text piece by
//! piece while ids arrive ([`Stream`]).
//!
//! Normaliser, pre-tokeniser (but for its regular expressions: `pieces`), post-processor, decoder and added tokens are those of the
//! `tokenizers` crate. What makes `tokenizer.json` slow is its model: hundreds of thousands of strings to parse and large hash maps to
//! fill. The compact form stores those of BPE, Unigram and WordPiece ready for use, hash tables included, and `FlatBpe`, `FlatUnigram` and
//! `FlatWordPiece` search them where they lie, in the executable's read-only pages. Only WordLevel stays JSON, which no supported model
//! has.

mod compact;
mod flat_bpe;
mod flat_unigram;
mod flat_wordpiece;
mod pieces;
mod stream;
#[cfg(test)]
mod tests;
mod vocabulary;

pub use self::compact::compact;
pub use self::stream::Stream;

use self::compact::{HEADER_BYTES, KIND_FLAT_BPE, KIND_FLAT_UNIGRAM, KIND_FLAT_WORDPIECE, MAGIC};
use self::flat_bpe::FlatBpe;
use self::flat_unigram::FlatUnigram;
use self::flat_wordpiece::FlatWordPiece;
use self::pieces::PreTokenizers;
use self::vocabulary::{Rest, Table, Vocabulary};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

use serde::Deserialize;
use serde_json::Value;
use tokenizers::models::bpe::BpeTrainer;
use tokenizers::tokenizer::{
    AddedToken, DecoderWrapper, Encoding, Model, ModelWrapper, NormalizerWrapper, PostProcessor, PostProcessorWrapper, Token,
    TokenizerImpl, TruncationDirection,
};

/// Ids of a vocabulary among which [`Text::special_around`] looks for one that is a word.
const LEADING_TRIES: u32 = 1024;

/// What can be wrong with a tokenizer or a text.
#[derive(Debug, thiserror::Error)]
pub enum TextError {
    /// The bytes are not a tokenizer.
    #[error("{0}")]
    Malformed(String),
    /// Two parts of the tokenizer contradict each other.
    #[error("{0}")]
    Disagree(String),
    /// A tokenizer, but of a kind that is not supported.
    #[error("{0}")]
    Unsupported(String),
    /// The tokenizer failed on this input.
    #[error("{0}")]
    Failed(String),
}

impl TextError {
    /// Exit code as in the table of the command line.
    pub fn exit_code(&self) -> i32 {
        match self {
            Self::Malformed(_) => 4,
            Self::Disagree(_) => 5,
            Self::Unsupported(_) => 6,
            Self::Failed(_) => 7,
        }
    }
}

fn malformed(what: impl std::fmt::Display) -> TextError {
    TextError::Malformed(what.to_string())
}

/// The model of a loaded tokenizer.
enum AnyModel<'a> {
    Bpe(FlatBpe<'a>),
    Unigram(FlatUnigram<'a>),
    WordPiece(FlatWordPiece<'a>),
    Crate(Box<ModelWrapper>),
}

impl AnyModel<'_> {
    /// Tokens of `text` from their ids and lengths; those without a length have the place of the one before.
    fn located(&self, tokens: Vec<(u32, usize)>) -> Vec<Token> {
        let (mut begin, mut end) = (0, 0);
        let located = tokens.into_iter().map(|(id, len)| {
            if len > 0 {
                (begin, end) = (end, end + len);
            }
            Token::new(id, self.id_to_token(id).unwrap_or_default(), (begin, end))
        });
        located.collect()
    }
}

impl Model for AnyModel<'_> {
    type Trainer = BpeTrainer;

    fn tokenize(&self, sequence: &str) -> tokenizers::Result<Vec<Token>> {
        match self {
            Self::Bpe(model) => Ok(self.located(model.tokens(sequence)?)),
            Self::Unigram(model) => Ok(self.located(model.tokens(sequence)?)),
            Self::WordPiece(model) => Ok(self.located(model.tokens(sequence)?)),
            Self::Crate(model) => model.tokenize(sequence),
        }
    }

    fn token_to_id(&self, token: &str) -> Option<u32> {
        match self {
            Self::Bpe(model) => model.vocabulary.id(token),
            Self::Unigram(model) => model.id(token),
            Self::WordPiece(model) => model.vocabulary.id(token),
            Self::Crate(model) => model.token_to_id(token),
        }
    }

    fn id_to_token(&self, id: u32) -> Option<String> {
        match self {
            Self::Bpe(model) => model.vocabulary.token(id).map(str::to_owned),
            Self::Unigram(model) => model.piece(id).map(str::to_owned),
            Self::WordPiece(model) => model.vocabulary.token(id).map(str::to_owned),
            Self::Crate(model) => model.id_to_token(id),
        }
    }

    fn get_vocab(&self) -> HashMap<String, u32> {
        match self {
            Self::Bpe(model) => model.vocabulary.tokens().map(|(token, id)| (token.to_owned(), id)).collect(),
            Self::Unigram(model) => (0..model.count() as u32).filter_map(|id| Some((model.piece(id)?.to_owned(), id))).collect(),
            Self::WordPiece(model) => model.vocabulary.tokens().map(|(token, id)| (token.to_owned(), id)).collect(),
            Self::Crate(model) => model.get_vocab(),
        }
    }

    fn get_vocab_size(&self) -> usize {
        match self {
            Self::Bpe(model) => model.vocabulary.count,
            Self::Unigram(model) => model.count(),
            Self::WordPiece(model) => model.vocabulary.count,
            Self::Crate(model) => model.get_vocab_size(),
        }
    }

    fn save(&self, _: &Path, _: Option<&str>) -> tokenizers::Result<Vec<PathBuf>> {
        Err("a loaded tokenizer is read-only".into())
    }

    fn get_trainer(&self) -> BpeTrainer {
        BpeTrainer::default()
    }
}

/// The parts of `tokenizer.json` that the crate reads itself.
#[derive(Deserialize)]
struct Parts {
    #[serde(default)]
    added_tokens: Vec<AddedToken>,
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizers>,
    post_processor: Option<PostProcessorWrapper>,
    decoder: Option<DecoderWrapper>,
    model: Value,
}

/// A model's settings.
fn settings<'m, S: Deserialize<'m>>(model: &'m Value) -> Result<S, TextError> {
    S::deserialize(model).map_err(|e| malformed(format!("model: {e}")))
}

type Inner<'a> = TokenizerImpl<AnyModel<'a>, NormalizerWrapper, PreTokenizers, PostProcessorWrapper, DecoderWrapper>;

/// A loaded tokenizer.
pub struct Text<'a> {
    inner: Inner<'a>,
    truncate: TruncationDirection,
}

/// Ids of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Encoded {
    /// Token ids.
    pub ids: Vec<u32>,
    /// Tokens that were cut off, special tokens not counted.
    pub truncated: usize,
}

impl<'a> Text<'a> {
    /// Reads what [`compact()`] wrote. The bytes stay in use: token texts and tables are not copied.
    pub fn load(bytes: &'a [u8]) -> Result<Self, TextError> {
        let broken = || malformed("not a compact tokenizer of this version");
        let head = bytes.get(..HEADER_BYTES).ok_or_else(broken)?;
        if head[..8] != MAGIC {
            return Err(broken());
        }
        let json_len = Table(&head[12..]).get(0).ok_or_else(broken)? as usize;
        let (json, tables) = bytes[HEADER_BYTES..].split_at_checked(json_len).ok_or_else(broken)?;
        let parts: Parts = serde_json::from_slice(json).map_err(malformed)?;
        let mut tables = Rest(tables);
        let model = match head[8] {
            KIND_FLAT_BPE => AnyModel::Bpe(FlatBpe::load(&mut tables, settings(&parts.model)?).ok_or_else(broken)?),
            KIND_FLAT_UNIGRAM => AnyModel::Unigram(FlatUnigram::load(&mut tables, settings(&parts.model)?).ok_or_else(broken)?),
            KIND_FLAT_WORDPIECE => {
                let vocabulary = Vocabulary::load(&mut tables).ok_or_else(broken)?;
                AnyModel::WordPiece(FlatWordPiece { settings: settings(&parts.model)?, vocabulary })
            }
            _ => AnyModel::Crate(Box::new(serde_json::from_value(parts.model).map_err(|e| malformed(format!("model: {e}")))?)),
        };
        let mut inner: Inner<'a> = TokenizerImpl::new(model);
        inner
            .with_normalizer(parts.normalizer)
            .with_pre_tokenizer(parts.pre_tokenizer)
            .with_post_processor(parts.post_processor)
            .with_decoder(parts.decoder);
        inner.add_tokens(&parts.added_tokens);
        let truncate = if head[9] == 1 { TruncationDirection::Left } else { TruncationDirection::Right };
        Ok(Self { inner, truncate })
    }

    /// Ids of `text`, with the tokens that the tokenizer puts around a sequence when `special`.
    pub fn encode(&self, text: &str, special: bool) -> Result<Vec<u32>, TextError> {
        let encoding = self.inner.encode_fast(text, special).map_err(|e| TextError::Failed(format!("tokenizer: {e}")))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// Like [`Text::encode`] with special tokens, cut to `max_len` ids in all.
    pub fn encode_cut(&self, text: &str, max_len: usize) -> Result<Encoded, TextError> {
        let failed = |e: tokenizers::Error| TextError::Failed(format!("tokenizer: {e}"));
        let mut encoding: Encoding = self.inner.encode_fast(text, false).map_err(failed)?;
        let around = self.inner.get_post_processor().map_or(0, |p| p.added_tokens(false));
        let room = max_len.saturating_sub(around);
        let truncated = encoding.len().saturating_sub(room);
        if truncated > 0 {
            encoding.truncate(room, 0, self.truncate);
        }
        let encoding = self.inner.post_process(encoding, None, true).map_err(failed)?;
        Ok(Encoded { ids: encoding.get_ids().to_vec(), truncated })
    }

    /// Text of `ids`.
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String, TextError> {
        self.inner.decode(ids, skip_special).map_err(|e| TextError::Failed(format!("tokenizer: {e}")))
    }

    /// Whether [`Text::decode`] leaves an id out when it skips special tokens: it has no token, or a special one.
    fn leaves_out(&self, id: u32) -> bool {
        self.inner.id_to_token(id).is_none_or(|token| self.inner.get_added_vocabulary().is_special_token(&token))
    }

    /// The ids that the tokenizer puts in front of a text (BOS, CLS) and behind it (EOS, SEP), empty where it puts none.
    pub fn special_around(&self) -> Result<(Vec<u32>, Vec<u32>), TextError> {
        // Any text that has tokens will do. A vocabulary may lack this one, but not all of its own words.
        let words = (0..LEADING_TRIES).map(|id| self.decode(&[id], true).unwrap_or_default());
        let tokens = |text: &String| self.encode(text, false).is_ok_and(|ids| !ids.is_empty());
        let text = std::iter::once("a".to_string()).chain(words).find(tokens).unwrap_or_default();
        let with = self.encode(&text, true)?;
        let without = self.encode(&text, false)?;
        let at = (0..=with.len().saturating_sub(without.len())).find(|&at| with[at..].starts_with(&without)).unwrap_or(0);
        Ok((with[..at].to_vec(), with[at + without.len()..].to_vec()))
    }

    /// Id of a token, added tokens included.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// Id of a special token, which decoding may leave out.
    pub fn special_to_id(&self, token: &str) -> Option<u32> {
        self.token_to_id(token).filter(|_| self.inner.get_added_vocabulary().is_special_token(token))
    }

    /// The token behind an id, as the vocabulary writes it.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }
}
