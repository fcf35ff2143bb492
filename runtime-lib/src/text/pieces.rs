//! Cutting a text into the pieces that the model of a tokenizer sees.
//!
//! In: `pre_tokenizer` of `tokenizer.json`. Out: the pieces of the `tokenizers` crate, by its own code but for what searches for a regular
//! expression. The crate's engine gives a search up that would remember a million places to go back to, as behind a run of a million
//! letters or spaces; the crate takes that for the end of the text, whose rest becomes one piece with other ids. Here it is an error.

use fancy_regex::Regex;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use tokenizers::pattern::Invert;
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::pre_tokenizers::split::SplitPattern;
use tokenizers::tokenizer::{PreTokenizedString, PreTokenizer, PreTokenizerWrapper, SplitDelimiterBehavior};

/// The pattern that the crate's `ByteLevel` has, which is GPT-2's.
const BYTE_LEVEL: &str = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+";

/// What cuts a text, step by step.
pub(super) struct PreTokenizers(Vec<Step>);

enum Step {
    /// `Split` by a regular expression, `ByteLevel` with its own, before which it may want a space.
    Split { regex: Regex, space_before: bool, behavior: SplitDelimiterBehavior, invert: bool },
    /// All others, whose searches end where the text does.
    Other(PreTokenizerWrapper),
}

impl PreTokenizer for PreTokenizers {
    fn pre_tokenize(&self, text: &mut PreTokenizedString) -> tokenizers::Result<()> {
        self.0.iter().try_for_each(|step| match step {
            Step::Split { regex, space_before, behavior, invert } => text.split(|_, mut piece| {
                if *space_before && !piece.get().starts_with(' ') {
                    piece.prepend(" ");
                }
                let cut = if *invert { piece.split(Invert(regex), *behavior) } else { piece.split(regex, *behavior) };
                cut.map_err(|e| {
                    format!("a run of letters, spaces or the like is too long for its pattern: expected less than a million ({e})").into()
                })
            }),
            Step::Other(other) => other.pre_tokenize(text),
        })
    }
}

impl<'de> Deserialize<'de> for PreTokenizers {
    fn deserialize<D: Deserializer<'de>>(json: D) -> Result<Self, D::Error> {
        let mut steps = Vec::new();
        add(&mut steps, Value::deserialize(json)?).map_err(D::Error::custom)?;
        Ok(Self(steps))
    }
}

/// Adds the steps of a part, which may consist of parts.
fn add(steps: &mut Vec<Step>, mut part: Value) -> tokenizers::Result<()> {
    #[derive(Deserialize)]
    struct Split {
        pattern: SplitPattern,
        behavior: SplitDelimiterBehavior,
        invert: bool,
    }
    if part["type"] == "Sequence"
        && let Some(Value::Array(parts)) = part.get_mut("pretokenizers").map(Value::take)
    {
        return parts.into_iter().try_for_each(|part| add(steps, part));
    }
    if part["type"] == "Split" {
        let Split { pattern, behavior, invert } = Split::deserialize(part)?;
        let regex = match pattern {
            SplitPattern::String(text) => Regex::new(&fancy_regex::escape(&text))?,
            SplitPattern::Regex(regex) => Regex::new(&regex)?,
        };
        steps.push(Step::Split { regex, space_before: false, behavior, invert });
        return Ok(());
    }
    match PreTokenizerWrapper::deserialize(part)? {
        PreTokenizerWrapper::ByteLevel(ByteLevel { add_prefix_space, trim_offsets, use_regex: true, .. }) => {
            let behavior = SplitDelimiterBehavior::Isolated;
            steps.push(Step::Split { regex: Regex::new(BYTE_LEVEL)?, space_before: add_prefix_space, behavior, invert: false });
            steps.push(Step::Other(PreTokenizerWrapper::ByteLevel(ByteLevel::new(false, trim_offsets, false))));
        }
        other => steps.push(Step::Other(other)),
    }
    Ok(())
}
