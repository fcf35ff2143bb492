//! `embed`: texts in, vectors out.

use std::io::{self, IsTerminal};

use clap::ArgMatches;

use super::Cx;
use super::args::EmbedArgs;
use super::error::{Failure, warn, warn_unless_finite};
use super::input::{Input, input};
use super::progress::Progress;
use super::streams::{print, within_memory};
use crate::abi::Pooling;
use crate::encode::Encoder;
use crate::text::Text;

/// Texts whose vectors are kept until all of them are printed: so many that threads seldom wait for each other's last one.
const TEXTS_AT_ONCE: usize = 1024;

pub(super) fn embed(cx: &Cx, args: &EmbedArgs, flags: &ArgMatches) -> Result<(), Failure> {
    let defaults = cx.manifest().pooling.as_ref();
    let pooling = args.pooling.unwrap_or(defaults.map_or(Pooling::Mean, |p| p.mode));
    let normalize = args.normalize.unwrap_or(defaults.is_some_and(|p| p.normalize));
    let texts = match input(&args.input, flags, "LINES")? {
        Input::Tokens(tokens) => vec![tokens],
        Input::Prompt(text) => encoded(cx, &text, |text| vec![text])?,
        Input::File(lines) => encoded(cx, &lines, |lines| lines.lines().collect())?,
    };
    let mut encoder = Encoder::new(cx.session(&args.machine)?);
    // Texts that do not fit are told of before the first vector is printed.
    encoder.check_lengths(texts.iter().map(Vec::len))?;
    let vector = pooling.vector(normalize);
    // On a terminal it would write over an object that is printed in several parts.
    let in_parts = args.json && texts.len() > TEXTS_AT_ONCE && io::stdout().is_terminal();
    let progress = Progress::new("texts", texts.len(), args.quiet || in_parts);
    let mut out = Output { json: args.json, begun: false };
    for texts in texts.chunks(TEXTS_AT_ONCE) {
        let embeddings = encoder.encode(texts, |session, run| {
            progress.advance();
            session.pooled(run, vector).to_vec()
        })?;
        progress.hide();
        embeddings.iter().for_each(|embedding| warn_unless_finite(embedding));
        embeddings.iter().try_for_each(|embedding| out.vector(embedding))?;
    }
    out.end()
}

/// Vectors on stdout as they come: one to a line, or one JSON object `{"embeddings":[[..],..]}` on one line in all. Nothing is printed
/// before the first is there.
struct Output {
    json: bool,
    begun: bool,
}

impl Output {
    const BEGIN: &str = "{\"embeddings\":[";

    fn vector(&mut self, vector: &[f32]) -> Result<(), Failure> {
        if !self.json {
            let words: Vec<String> = vector.iter().map(f32::to_string).collect();
            return print(&(words.join(" ") + "\n"));
        }
        let before = if std::mem::replace(&mut self.begun, true) { "," } else { Output::BEGIN };
        print(&(before.to_owned() + &serde_json::to_string(vector).map_err(Failure::bug)?))
    }
    fn end(&self) -> Result<(), Failure> {
        match (self.json, self.begun) {
            (false, _) => Ok(()),
            (true, true) => print("]}\n"),
            (true, false) => print(&(Output::BEGIN.to_owned() + "]}\n")),
        }
    }
}

/// Ids of all texts that `texts` finds in the input, cut where the model's files say.
fn encoded(cx: &Cx, input: &str, texts: impl FnOnce(&str) -> Vec<&str>) -> Result<Vec<Vec<u32>>, Failure> {
    let loading = cx.load_text()?;
    let limit = cx.manifest().text.as_ref().and_then(|t| t.max_length).map_or(usize::MAX, |n| n as usize);
    let tokenizer = loading.wait()?;
    let (all, cut) = within_memory(input.len(), || ids(&tokenizer, &texts(input), limit))?;
    if cut > 0 {
        warn("length", format!("{cut} of {} texts were cut to {limit} tokens, as the model's files say", all.len()));
    }
    Ok(all)
}

/// Ids of all texts, at most `limit` of each, and how many texts were cut.
fn ids(tokenizer: &Text, texts: &[&str], limit: usize) -> Result<(Vec<Vec<u32>>, usize), Failure> {
    let mut cut = 0;
    let all = texts
        .iter()
        .enumerate()
        .map(|(index, text)| {
            let encoded = tokenizer.encode_cut(text, limit).map_err(|error| match texts {
                [_] => error.into(),
                _ => Failure::new(error.exit_code(), "tokenizer", format!("text {}: {error}", index + 1)),
            })?;
            cut += usize::from(encoded.truncated > 0);
            Ok(encoded.ids)
        })
        .collect::<Result<Vec<_>, Failure>>()?;
    Ok((all, cut))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_text_that_has_no_tokens_is_named() {
        let json = r#"{"added_tokens":[],"normalizer":null,"pre_tokenizer":null,"post_processor":null,"decoder":null,
            "model":{"type":"WordLevel","vocab":{"a":0},"unk_token":"[UNK]"}}"#;
        let bytes = crate::text::compact(json.as_bytes()).unwrap();
        let text = Text::load(&bytes).unwrap();
        assert_eq!(ids(&text, &["a", "a"], 9).unwrap(), (vec![vec![0], vec![0]], 0));
        let line = |texts: &[&str]| ids(&text, texts, 9).unwrap_err().lines().concat();
        assert!(line(&["a", "b"]).starts_with("error[E7-tokenizer]: text 2: tokenizer: "), "{}", line(&["a", "b"]));
        assert!(line(&["b"]).starts_with("error[E7-tokenizer]: tokenizer: "), "{}", line(&["b"]));
    }
}
