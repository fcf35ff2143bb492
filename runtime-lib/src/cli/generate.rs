//! `generate` and `chat`: prompts in, text out as it comes.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, IsTerminal, Read, Write};
use std::time::Instant;

use clap::ArgMatches;
use serde::Serialize;
use serde_json::json;

use super::args::{ChatArgs, GenerateArgs, SamplingArgs, on_command_line};
use super::error::{Failure, warn, warn_unless_finite};
use super::{Cx, Input, LoadingText, MAX_INPUT_BYTES, Stdin, input, joined, print, print_json, too_large, utf8};
use crate::abi::GenerationInfo;
use crate::decode::Decoder;
use crate::sample::{Sampler, Sampling, StopFilter};
use crate::text::{Stream, Text};
use rcompile_template::{Template, TemplateError, TemplateErrorKind, TemplateInput};

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum FinishReason {
    Length,
    Stop,
    Eos,
}

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

pub(super) fn generate(cx: &Cx, args: &GenerateArgs, flags: &ArgMatches) -> Result<(), Failure> {
    let input = input(&args.input, flags)?;
    // A variable that is set for another verb or run is no mistake.
    if args.system.is_some() && !args.chat && on_command_line(flags, "system") {
        return Err(Failure::usage("--system: expected together with --chat"));
    }
    let from_text = matches!(input, Input::Text(_));
    if args.chat && !from_text && on_command_line(flags, "chat") {
        return Err(Failure::usage("--chat: expected -p TEXT or -f FILE, found --tokens"));
    }
    // With token ids the tokenizer is needed for the answer only: it loads while the prompt is computed.
    let mut loading = if from_text || cx.manifest().text.is_some() || !args.stop.is_empty() { Some(cx.load_text()?) } else { None };
    let session = cx.session("step", &args.machine)?;
    let mut decoder = Decoder::new(session);
    let mut text = None;
    let prompt = match input {
        Input::Tokens(tokens) => tokens,
        Input::Text(input) => {
            let loaded = wait(&mut loading)?;
            let ids = if args.chat {
                let messages = first_messages(args.system.as_deref(), &input);
                loaded.encode(&Chat::of(cx)?.render(&messages)?, false)?
            } else {
                loaded.encode(&input, true)?
            };
            text = Some(loaded);
            ids
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
    let mut answer = Answer::new(args.stop.clone());
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
        let rate = |count: usize, seconds: f64| {
            if count == 0 || seconds <= 0.0 { 0.0 } else { count as f64 / seconds }
        };
        let decoded = answer.tokens.len().saturating_sub(1);
        return print_json(&Report {
            prompt_tokens: &prompt,
            tokens: &answer.tokens,
            text: text.is_some().then_some(&answer.text),
            finish_reason: reason,
            timings: Timings {
                load_ms,
                prefill_ms: prefill_s * 1e3,
                prefill_tokens_per_s: rate(prompt.len(), prefill_s),
                decode_ms: if decoded == 0 { 0.0 } else { decode_s * 1e3 },
                decode_tokens_per_s: rate(decoded, decode_s),
                first_token_ms,
            },
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

fn wait(loading: &mut Option<LoadingText>) -> Result<Text<'static>, Failure> {
    match loading.take() {
        Some(loading) => loading.wait(),
        None => Err(Failure::bug("the tokenizer was not loaded")),
    }
}

/// A prompt must have a first token; the model's BOS is one.
pub(super) fn or_bos(prompt: Vec<u32>, generation: &GenerationInfo) -> Result<Vec<u32>, Failure> {
    match (prompt.is_empty(), generation.bos_token_id) {
        (false, _) => Ok(prompt),
        (true, Some(bos)) => Ok(vec![bos]),
        (true, None) => Err(Failure::usage("the input has no tokens")),
    }
}

/// Flags over the model's defaults.
fn sampling(args: &SamplingArgs, model: &GenerationInfo) -> Sampling {
    let asked = args.top_k.is_some() || args.top_p.is_some() || args.min_p.is_some();
    let random = model.do_sample || asked;
    Sampling {
        temperature: args.temp.unwrap_or(if random { model.temperature.unwrap_or(1.0) } else { 0.0 }),
        top_k: args.top_k.or(model.top_k.map(|k| k as usize)).unwrap_or(0),
        top_p: args.top_p.or(model.top_p).unwrap_or(1.0),
        min_p: args.min_p.or(model.min_p).unwrap_or(0.0),
        repeat_penalty: args.repeat_penalty.or(model.repetition_penalty).unwrap_or(1.0),
        seed: args.seed,
    }
}

struct Limits<'l> {
    n_predict: usize,
    eos: &'l [u32],
}

/// A text that grows token by token.
struct Answer {
    tokens: Vec<u32>,
    text: String,
    stream: Stream,
    stops: Vec<String>,
    filter: StopFilter,
}

impl Answer {
    fn new(stops: Vec<String>) -> Self {
        Self { tokens: Vec::new(), text: String::new(), stream: Stream::default(), filter: StopFilter::new(stops.clone()), stops }
    }

    /// Generates behind what slot 0 holds. `each` is called after every token with the text that became certain.
    fn grow(
        &mut self,
        decoder: &mut Decoder,
        sampler: &mut Sampler,
        text: Option<&Text>,
        limits: &Limits,
        mut each: impl FnMut(&Self, &str) -> Result<(), Failure>,
    ) -> Result<FinishReason, Failure> {
        // Special tokens have no text that the filter would see.
        let stop_ids: Vec<u32> = self.stops.iter().filter_map(|stop| text?.special_to_id(stop)).collect();
        let reason = loop {
            if self.tokens.len() >= limits.n_predict {
                break FinishReason::Length;
            }
            let token = sampler.choose(decoder.logits(0));
            warn_unless_finite(&decoder.logits(0)[token as usize..][..1]);
            sampler.saw(&[token]);
            self.tokens.push(token);
            if limits.eos.contains(&token) {
                each(self, "")?;
                break FinishReason::Eos;
            }
            if stop_ids.contains(&token) {
                each(self, "")?;
                break FinishReason::Stop;
            }
            let mut shown = String::new();
            let mut stopped = false;
            if let Some(text) = text {
                let piece = self.stream.push(text, token)?;
                (shown, stopped) = self.filter.push(&piece);
                self.text += &shown;
            }
            each(self, &shown)?;
            if stopped {
                return Ok(FinishReason::Stop);
            }
            if decoder.slots().room(0) == 0 {
                break FinishReason::Length;
            }
            if self.tokens.len() < limits.n_predict {
                decoder.feed(0, &[token])?;
            }
        };
        if let Some(text) = text {
            let (mut rest, stopped) = self.filter.push(&self.stream.finish(text)?);
            if !stopped {
                rest += &self.filter.finish();
            }
            self.text += &rest;
            each(self, &rest)?;
            if stopped {
                return Ok(FinishReason::Stop);
            }
        }
        Ok(reason)
    }
}

/// The model's chat template.
struct Chat<'m> {
    template: Template,
    special_tokens: &'m BTreeMap<String, String>,
}

impl<'m> Chat<'m> {
    fn of(cx: &'m Cx) -> Result<Self, Failure> {
        let no_template = || Failure::new(6, "template", "this model has no chat template").help("use generate -p TEXT without --chat");
        let info = cx.manifest().text.as_ref().ok_or_else(no_template)?;
        let span = info.chat_template.ok_or_else(no_template)?;
        let source = cx.payload.blob(span, "chat template")?;
        let source = std::str::from_utf8(source).map_err(|_| Failure::new(4, "template", "chat template: not UTF-8"))?;
        Ok(Self { template: Template::new(source)?, special_tokens: &info.special_tokens })
    }

    fn render(&self, messages: &[serde_json::Value]) -> Result<String, TemplateError> {
        self.template.render(&TemplateInput {
            messages: messages.to_vec().into(),
            tools: None,
            add_generation_prompt: true,
            special_tokens: self.special_tokens,
            extra: None,
            now: None,
        })
    }
}

impl From<TemplateError> for Failure {
    fn from(error: TemplateError) -> Self {
        let exit = match error.kind {
            TemplateErrorKind::Raised => 2,
            TemplateErrorKind::Limit => 7,
            _ => 4,
        };
        Self::new(exit, "template", error)
    }
}

fn first_messages(system: Option<&str>, user: &str) -> Vec<serde_json::Value> {
    let system = system.map(|s| json!({"role": "system", "content": s}));
    let user = json!({"role": "user", "content": user});
    system.into_iter().chain([user]).collect()
}

pub(super) fn chat(cx: &Cx, args: &ChatArgs) -> Result<(), Failure> {
    let chat = Chat::of(cx)?;
    let loading = cx.load_text()?;
    let mut decoder = Decoder::new(cx.session("step", &args.machine)?);
    let text = loading.wait()?;
    let sampling = sampling(&args.sampling, &cx.manifest().generation);
    let vocab = cx.manifest().vocab_size as usize;
    let mut sampler = Sampler::new(sampling, vocab);

    let stdin = std::io::stdin();
    let prompt = |mark: &str| {
        if stdin.is_terminal() {
            // Without stderr there is nobody to prompt.
            let _ = write!(std::io::stderr(), "{mark}");
        }
    };
    let mut messages: Vec<serde_json::Value> = Vec::new();
    if let Some(system) = &args.system {
        messages.push(json!({"role": "system", "content": system}));
    }
    let always = messages.len();
    let ctx_size = cx.manifest().ctx_size as usize;
    // The ids of a conversation, or why it is too long.
    let ids_of = |messages: &[serde_json::Value]| -> Result<Result<Vec<u32>, String>, Failure> {
        let rendered = match chat.render(messages) {
            Err(error) if error.kind == TemplateErrorKind::Limit => return Ok(Err(error.to_string())),
            rendered => rendered?,
        };
        let ids = or_bos(text.encode(&rendered, false)?, &cx.manifest().generation)?;
        let needed = ids.len();
        let too_long = || format!("{needed} positions are needed, the executable was built for {ctx_size}");
        Ok(if needed > ctx_size { Err(too_long()) } else { Ok(ids) })
    };
    // Tokens whose keys and values lie in slot 0.
    let mut cached: Vec<u32> = Vec::new();
    let mut lines = BufReader::new(Stdin);
    let mut read = 0;
    loop {
        prompt("> ");
        let mut line = Vec::new();
        let begin = read;
        let mut bounded = (&mut lines).take(MAX_INPUT_BYTES + 1);
        read += bounded.read_until(b'\n', &mut line).map_err(|e| Failure::new(3, "input", format!("stdin: {e}")))?;
        if line.len() as u64 > MAX_INPUT_BYTES {
            return Err(too_large("stdin"));
        }
        let line = utf8("stdin", begin, line)?;
        let line = line.trim_end_matches(['\n', '\r']);
        if read == begin || line == "/exit" {
            return Ok(());
        }
        if line.trim().is_empty() {
            continue;
        }
        messages.push(json!({"role": "user", "content": line}));
        let rendered = match ids_of(&messages)? {
            Ok(ids) => ids,
            Err(too_long) => {
                let anew = [&messages[..always], &messages[messages.len() - 1..]].concat();
                match ids_of(&anew)? {
                    Ok(ids) => {
                        warn("context", format!("the conversation starts anew: {too_long}"));
                        messages = anew;
                        ids
                    }
                    Err(too_long) => {
                        warn("context", format!("the message was left out: {too_long}"));
                        messages.pop();
                        continue;
                    }
                }
            }
        };
        let reuse = common_prefix(&cached, &rendered).min(rendered.len() - 1);
        decoder.truncate(0, reuse);
        decoder.feed(0, &rendered[reuse..])?;
        // What the template left out of earlier turns does not count, what stays in slot 0 does.
        sampler.forget();
        sampler.saw(&rendered);

        let mut answer = Answer::new(args.stop.clone());
        let limits = Limits { n_predict: args.n_predict, eos: &cx.manifest().generation.eos_token_ids };
        let reason = answer.grow(&mut decoder, &mut sampler, Some(&text), &limits, |_, piece| print(piece))?;
        print("\n")?;
        if reason == FinishReason::Length {
            warn(
                "length",
                format!(
                    "the answer was cut: {} of {} positions are in use, an answer has at most {} tokens",
                    decoder.slots().len(0),
                    cx.manifest().ctx_size,
                    args.n_predict
                ),
            );
        }
        cached = rendered;
        cached.extend(&answer.tokens);
        cached.truncate(decoder.slots().len(0));
        messages.push(json!({"role": "assistant", "content": answer.text}));
    }
}

fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::tests::{VOCAB, decoder_session};

    #[test]
    fn flags_win_over_the_models_defaults() {
        let model =
            GenerationInfo { do_sample: true, temperature: Some(0.6), top_k: Some(20), min_p: Some(0.05), ..GenerationInfo::default() };
        let by_model = sampling(&SamplingArgs::default(), &model);
        assert_eq!(by_model.min_p, 0.05);
        assert_eq!((by_model.temperature, by_model.top_k, by_model.top_p), (0.6, 20, 1.0));
        let greedy = SamplingArgs { temp: Some(0.0), ..SamplingArgs::default() };
        assert_eq!(sampling(&greedy, &model).temperature, 0.0);
        let none = GenerationInfo::default();
        assert_eq!(sampling(&SamplingArgs::default(), &none).temperature, 0.0);
        let nucleus = SamplingArgs { top_p: Some(0.9), ..SamplingArgs::default() };
        assert_eq!(sampling(&nucleus, &none).temperature, 1.0);
    }

    /// The fake decoder counts tokens, so greedy output repeats the most frequent one.
    #[test]
    fn answers_end_by_length_context_and_eos() {
        let grow = |prompt: usize, n_predict, eos: &[u32]| {
            let mut decoder = Decoder::new(decoder_session(&[1, 8, 64], 1, 1));
            decoder.feed(0, &vec![3; prompt]).unwrap();
            let mut sampler = Sampler::new(Sampling::GREEDY, VOCAB as usize);
            let mut answer = Answer::new(Vec::new());
            let limits = Limits { n_predict, eos };
            let mut calls = 0;
            let reason = answer
                .grow(&mut decoder, &mut sampler, None, &limits, |_, _| {
                    calls += 1;
                    Ok(())
                })
                .unwrap();
            assert_eq!(calls, answer.tokens.len());
            (reason, answer.tokens.len())
        };
        // Element 0 of the fake's logits names the bucket, so token 0 follows everything.
        assert_eq!(grow(5, 4, &[]), (FinishReason::Length, 4));
        assert_eq!(grow(5, 0, &[]), (FinishReason::Length, 0));
        assert_eq!(grow(5, 4, &[0]), (FinishReason::Eos, 1));
        assert_eq!(grow(598, 100, &[]), (FinishReason::Length, 3));
        assert_eq!(grow(600, 100, &[]), (FinishReason::Length, 1));
    }

    #[test]
    fn a_special_token_may_be_a_stop() {
        let json = r#"{"added_tokens":[{"id":0,"content":"</s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}],
            "normalizer":null,"pre_tokenizer":null,"post_processor":null,"decoder":{"type":"Fuse"},
            "model":{"type":"BPE","vocab":{"</s>":0,"a":1},"merges":[]}}"#;
        let bytes = crate::text::compact(json.as_bytes()).unwrap();
        let text = Text::load(&bytes).unwrap();
        let grow = |stop: &str| {
            let mut decoder = Decoder::new(decoder_session(&[1, 8, 64], 1, 1));
            decoder.feed(0, &[3]).unwrap();
            let mut sampler = Sampler::new(Sampling::GREEDY, VOCAB as usize);
            let mut answer = Answer::new(vec![stop.into()]);
            let limits = Limits { n_predict: 4, eos: &[] };
            let reason = answer.grow(&mut decoder, &mut sampler, Some(&text), &limits, |_, _| Ok(())).unwrap();
            (reason, answer.tokens.len())
        };
        // Token 0 follows everything.
        assert_eq!(grow("</s>"), (FinishReason::Stop, 1));
        assert_eq!(grow("a"), (FinishReason::Length, 4));
    }

    #[test]
    fn prefixes() {
        assert_eq!(common_prefix(&[1, 2, 3], &[1, 2, 4, 5]), 2);
        assert_eq!(common_prefix(&[], &[1]), 0);
        assert!(or_bos(vec![], &GenerationInfo::default()).is_err());
        let bos = GenerationInfo { bos_token_id: Some(7), ..GenerationInfo::default() };
        assert_eq!(or_bos(vec![], &bos).unwrap(), [7]);
    }
}
