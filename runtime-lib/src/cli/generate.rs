//! `generate`: a prompt in, text out as it comes.

use std::time::Instant;

use clap::ArgMatches;
use serde::Serialize;

use super::answer::{Answer, FinishReason, Limits, or_bos, sampling};
use super::args::{GenerateArgs, on_command_line};
use super::error::{Failure, warn};
use super::input::{Input, input};
use super::streams::{joined, print, print_json, within_memory};
use super::template::{ChatTemplate, admit, first_messages};
use super::{Cx, LoadingText};
use crate::decode::Decoder;
use crate::sample::Sampler;
use crate::text::Text;

#[derive(Serialize)]
struct Report<'r> {
    prompt_tokens: &'r [u32],
    tokens: &'r [u32],
    text: Option<&'r str>,
    finish_reason: FinishReason,
    timings: Timings,
}

#[derive(Serialize)]
struct Timings {
    load_ms: f64,
    prefill_ms: f64,
    prefill_tokens_per_s: f64,
    decode_ms: f64,
    decode_tokens_per_s: f64,
    first_token_ms: f64,
}

impl Timings {
    /// Of a prompt and of the tokens behind the first, each with their seconds.
    fn new(load_ms: f64, (prompt, prefill_s): (usize, f64), (decoded, decode_s): (usize, f64), first_token_ms: f64) -> Timings {
        let rate = |count: usize, seconds: f64| if count == 0 || seconds <= 0.0 { 0.0 } else { count as f64 / seconds };
        Timings {
            load_ms,
            prefill_ms: prefill_s * 1e3,
            prefill_tokens_per_s: rate(prompt, prefill_s),
            decode_ms: if decoded == 0 { 0.0 } else { decode_s * 1e3 },
            decode_tokens_per_s: rate(decoded, decode_s),
            first_token_ms,
        }
    }
}

pub(super) fn generate(cx: &Cx, args: &GenerateArgs, flags: &ArgMatches) -> Result<(), Failure> {
    let input = input(&args.input, flags, "FILE")?;
    let from_text = !matches!(input, Input::Tokens(_));
    contradictions(args, flags, from_text)?;
    // With token ids the tokenizer is needed for the answer only: it loads while the prompt is computed.
    let mut loading = if from_text || cx.manifest().text.is_some() || !args.stop.is_empty() { Some(cx.load_text()?) } else { None };
    let session = cx.session(&args.machine)?;
    let mut decoder = Decoder::new(session);
    let mut text = None;
    let prompt = match input {
        Input::Tokens(tokens) => tokens,
        Input::Prompt(prompt) => encoded(cx, args, text.insert(wait(&mut loading)?), &prompt, &prompt)?,
        Input::File(file) => {
            // The line break that ends a file is none of what a user says.
            let said = file.strip_suffix("\r\n").or_else(|| file.strip_suffix('\n')).unwrap_or(&file);
            encoded(cx, args, text.insert(wait(&mut loading)?), &file, said)?
        }
    };
    let prompt = or_bos(prompt, &cx.manifest().generation)?;
    let load_ms = cx.started.age_ms();

    let mut sampler = Sampler::new(sampling(&args.sampling, &cx.manifest().generation), cx.manifest().vocab_size as usize);
    sampler.saw(&prompt);
    let begin = Instant::now();
    decoder.feed(0, &prompt)?;
    let prefill_s = begin.elapsed().as_secs_f64();
    if text.is_none() && loading.is_some() {
        text = Some(wait(&mut loading)?);
    }

    let stream = !args.json && !args.no_stream;
    let mut first_token_ms = 0.0;
    let mut first_at = Instant::now();
    // What a chat model says is a text of its own.
    let mut answer = match &text {
        Some(text) if !(args.chat && from_text) => Answer::behind(&prompt, text, args.stop.clone())?,
        _ => Answer::new(args.stop.clone()),
    };
    let reason = answer.grow(
        &mut decoder,
        &mut sampler,
        text.as_ref(),
        &Limits { n_predict: args.n_predict, eos: if args.ignore_eos { &[] } else { &cx.manifest().generation.eos_token_ids } },
        |answer, piece| {
            if answer.tokens.len() == 1 && first_token_ms == 0.0 {
                first_token_ms = cx.started.age_ms();
                first_at = Instant::now();
            }
            if stream { print(piece) } else { Ok(()) }
        },
    )?;
    let decode_s = first_at.elapsed().as_secs_f64();
    let count = answer.tokens.len();

    if args.json {
        return print_json(&Report {
            prompt_tokens: &prompt,
            tokens: &answer.tokens,
            text: text.is_some().then_some(&answer.text),
            finish_reason: reason,
            timings: Timings::new(load_ms, (prompt.len(), prefill_s), (count.saturating_sub(1), decode_s), first_token_ms),
        });
    }
    match (text.is_some(), stream) {
        (true, true) => print("\n")?,
        (true, false) => print(&(answer.text + "\n"))?,
        // Without a tokenizer the answer is its ids.
        (false, _) => print(&(joined(&answer.tokens) + "\n"))?,
    }
    if reason == FinishReason::Length && count < args.n_predict {
        let (wanted, size) = (args.n_predict, cx.manifest().ctx_size);
        warn("context", format!("the text ends after {count} of {wanted} tokens: all {size} positions are in use"));
    }
    Ok(())
}

/// Flags that make no sense together. A variable that is set for another verb or run is no mistake.
fn contradictions(args: &GenerateArgs, flags: &ArgMatches, from_text: bool) -> Result<(), Failure> {
    if args.system.is_some() && !args.chat && on_command_line(flags, "system") {
        return Err(Failure::usage("--system: expected together with --chat"));
    }
    if args.chat && !from_text && on_command_line(flags, "chat") {
        return Err(Failure::usage("--chat: expected -p TEXT or -f FILE, found --tokens"));
    }
    Ok(())
}

/// Token ids of an input, or where the chat template is asked for, of it with what a user says in that input.
fn encoded(cx: &Cx, args: &GenerateArgs, text: &Text<'_>, input: &str, said: &str) -> Result<Vec<u32>, Failure> {
    if !args.chat {
        return Ok(within_memory(input.len(), || text.encode(input, true))?);
    }
    admit(said.len())?;
    let rendered = ChatTemplate::of(cx)?.render(&first_messages(args.system.as_deref(), said))?;
    Ok(within_memory(rendered.len(), || text.encode(&rendered, false))?)
}

fn wait(loading: &mut Option<LoadingText>) -> Result<Text<'static>, Failure> {
    match loading.take() {
        Some(loading) => loading.wait(),
        None => Err(Failure::bug("the tokenizer was not loaded")),
    }
}
