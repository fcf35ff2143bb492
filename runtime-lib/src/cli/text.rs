//! `tokenize` and `detokenize`.

use clap::ArgMatches;
use serde::Serialize;

use super::args::{DetokenizeArgs, TokenizeArgs, token_list};
use super::error::Failure;
use super::streams::{joined, print, print_json, within_memory};
use super::{Cx, input};
use crate::step::StepError;

pub(super) fn tokenize(cx: &Cx, args: &TokenizeArgs, flags: &ArgMatches) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Report {
        tokens: Vec<u32>,
        pieces: Vec<String>,
    }
    let loading = cx.load_text()?;
    let input = input::text(&args.input, flags)?;
    let text = loading.wait()?;
    within_memory(input.len(), || {
        let tokens = text.encode(&input, !args.no_special)?;
        if !args.json {
            return print(&(joined(&tokens) + "\n"));
        }
        let pieces = tokens.iter().map(|&id| text.id_to_token(id).unwrap_or_default()).collect();
        print_json(&Report { tokens, pieces })
    })
}

pub(super) fn detokenize(cx: &Cx, args: &DetokenizeArgs) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Report {
        text: String,
    }
    let loading = cx.load_text()?;
    let tokens = token_list(&args.tokens)?;
    let vocab = cx.manifest().vocab_size;
    if let Some(&id) = tokens.iter().find(|&&id| id >= vocab) {
        return Err(StepError::Token { id, vocab }.into());
    }
    let text = loading.wait()?.decode(&tokens, args.skip_special)?;
    if args.json { print_json(&Report { text }) } else { print(&(text + "\n")) }
}
