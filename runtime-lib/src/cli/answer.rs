//! What the model says: token by token behind a prompt, as text as soon as it is certain, until something ends it.
//!
//! In: a decoder that holds the prompt, a sampler, what ends the answer. Out: ids, text, the reason of the end.

use serde::Serialize;

use super::args::SamplingArgs;
use super::error::{Failure, warn_unless_finite};
use crate::abi::GenerationInfo;
use crate::decode::Decoder;
use crate::sample::{Sampler, Sampling, StopFilter};
use crate::text::{Stream, Text};

/// Why a text ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(super) enum FinishReason {
    Length,
    Stop,
    Eos,
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
pub(super) fn sampling(args: &SamplingArgs, model: &GenerationInfo) -> Sampling {
    // Values that cut nothing off ask for nothing.
    let asked = args.top_k.is_some_and(|k| k > 0) || args.top_p.is_some_and(|p| p < 1.0) || args.min_p.is_some_and(|p| p > 0.0);
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

/// What ends an answer, beside the texts that stop it.
pub(super) struct Limits<'l> {
    /// Tokens at most.
    pub(super) n_predict: usize,
    /// Ids of which each is an end.
    pub(super) eos: &'l [u32],
}

/// A text that grows token by token.
pub(super) struct Answer {
    pub(super) tokens: Vec<u32>,
    pub(super) text: String,
    stream: Stream,
    stops: Vec<String>,
    filter: StopFilter,
}

impl Answer {
    /// A text of its own, ended by any of `stops`.
    pub(super) fn new(stops: Vec<String>) -> Self {
        Self::with(Stream::default(), stops)
    }

    /// A text that goes on where `prompt` ends, so that the two in a row are what all ids together mean.
    pub(super) fn behind(prompt: &[u32], text: &Text, stops: Vec<String>) -> Result<Self, Failure> {
        Ok(Self::with(Stream::behind(text, prompt)?, stops))
    }

    fn with(stream: Stream, stops: Vec<String>) -> Self {
        Self { tokens: Vec::new(), text: String::new(), stream, filter: StopFilter::new(stops.clone()), stops }
    }

    /// Generates behind what slot 0 holds. `each` is called after every token with the text that became certain.
    pub(super) fn grow(
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
            // `choose` skips NaN logits, so they would go unnoticed: check all logits of the first token, later only the chosen one.
            let looked_at = if self.tokens.is_empty() { decoder.logits(0) } else { &decoder.logits(0)[token as usize..][..1] };
            warn_unless_finite(looked_at);
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
        let all = SamplingArgs { top_k: Some(0), top_p: Some(1.0), min_p: Some(0.0), ..SamplingArgs::default() };
        assert_eq!(sampling(&all, &none).temperature, 0.0, "nothing is cut off");
        for cut in [
            SamplingArgs { top_p: Some(0.9), ..SamplingArgs::default() },
            SamplingArgs { top_k: Some(1), ..SamplingArgs::default() },
            SamplingArgs { min_p: Some(0.01), ..SamplingArgs::default() },
        ] {
            assert_eq!(sampling(&cut, &none).temperature, 1.0, "{cut:?}");
        }
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
    fn a_prompt_has_a_first_token() {
        assert!(or_bos(vec![], &GenerationInfo::default()).is_err());
        let bos = GenerationInfo { bos_token_id: Some(7), ..GenerationInfo::default() };
        assert_eq!(or_bos(vec![], &bos).unwrap(), [7]);
    }
}
