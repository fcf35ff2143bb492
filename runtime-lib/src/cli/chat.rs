//! `chat`: lines in, answers out, each behind all that was said before.
//!
//! In: lines of stdin. Out: answers as they come. What the next turn has in common with what slot 0 holds is not computed again. Where a
//! conversation leaves too little of the context for an answer, it starts anew with the last message.

use std::io::{BufRead, BufReader, IsTerminal, Read, Stderr, Write, stderr, stdin};

use rcompile_template::TemplateErrorKind;
use serde_json::Value;

use super::Cx;
use super::answer::{Answer, FinishReason, Limits, or_bos, sampling};
use super::args::ChatArgs;
use super::error::{Failure, warn};
use super::streams::{MAX_INPUT_BYTES, Stdin, print, read_within_memory, too_large, utf8, within_memory};
use super::template::{ChatTemplate, admit, message};
use crate::abi::Manifest;
use crate::decode::Decoder;
use crate::sample::Sampler;
use crate::text::{Text, TextError};

/// The share of the context that is kept for an answer, as long as there is anything to forget for it: less would be a stub of one.
const ANSWER_SHARE: usize = 8;

pub(super) fn chat(cx: &Cx, args: &ChatArgs) -> Result<(), Failure> {
    let template = ChatTemplate::of(cx)?;
    let loading = cx.load_text()?;
    let mut slot = Slot { decoder: Decoder::new(cx.session(&args.machine)?), held: Vec::new() };
    let text = loading.wait()?;
    let manifest = cx.manifest();
    let mut sampler = Sampler::new(sampling(&args.sampling, &manifest.generation), manifest.vocab_size as usize);
    let limits = Limits { n_predict: args.n_predict, eos: &manifest.generation.eos_token_ids };
    let mut conversation = Conversation::new(template, &text, manifest, args);
    let mut lines = Lines::of_stdin();
    while let Some(line) = lines.next()? {
        let Some(ids) = conversation.ask(&line)? else { continue };
        // What the template left out of earlier turns does not count, what stays in slot 0 does.
        sampler.forget();
        sampler.saw(&ids);
        slot.feed(ids)?;

        let mut answer = Answer::new(args.stop.clone());
        let reason = answer.grow(&mut slot.decoder, &mut sampler, Some(&text), &limits, |_, piece| print(piece))?;
        print("\n")?;
        if reason == FinishReason::Length {
            let (used, size, most) = (slot.decoder.slots().len(0), manifest.ctx_size, args.n_predict);
            warn("length", format!("the answer was cut: {used} of {size} positions are in use, an answer has at most {most} tokens"));
        }
        slot.holds(&answer.tokens);
        conversation.answered(&answer.text);
    }
    Ok(())
}

/// What was said, and how it becomes ids.
struct Conversation<'c> {
    template: ChatTemplate<'c>,
    text: &'c Text<'c>,
    manifest: &'c Manifest,
    messages: Vec<Value>,
    /// Messages that stay where it starts anew.
    always: usize,
    /// Positions that are left for an answer, where it need not start anew for them.
    reserve: usize,
}

impl<'c> Conversation<'c> {
    fn new(template: ChatTemplate<'c>, text: &'c Text<'c>, manifest: &'c Manifest, args: &ChatArgs) -> Self {
        let messages: Vec<_> = args.system.iter().map(|system| message("system", system)).collect();
        let reserve = (manifest.ctx_size as usize / ANSWER_SHARE).max(1).min(args.n_predict);
        Self { template, text, manifest, always: messages.len(), messages, reserve }
    }

    /// Adds what the user says. Gives the ids of all that was said, or none where this message alone is too long.
    fn ask(&mut self, line: &str) -> Result<Option<Vec<u32>>, Failure> {
        admit(line.len())?;
        self.messages.push(message("user", line));
        let anew = [&self.messages[..self.always], &self.messages[self.messages.len() - 1..]].concat();
        let reserve = if anew.len() < self.messages.len() { self.reserve } else { 0 };
        let too_long = match self.ids(&self.messages, reserve)? {
            Ok(ids) => return Ok(Some(ids)),
            Err(too_long) => too_long,
        };
        match self.ids(&anew, 0)? {
            Ok(ids) => {
                warn("context", format!("the conversation starts anew: {too_long}"));
                self.messages = anew;
                Ok(Some(ids))
            }
            Err(too_long) => {
                warn("context", format!("the message was left out: {too_long}"));
                self.messages.pop();
                Ok(None)
            }
        }
    }

    /// Adds what the model said.
    fn answered(&mut self, text: &str) {
        self.messages.push(message("assistant", text));
    }

    /// The ids of these messages, or why they are too long for the template, the tokenizer or to leave `reserve` positions.
    fn ids(&self, messages: &[Value], reserve: usize) -> Result<Result<Vec<u32>, String>, Failure> {
        let rendered = match self.template.render(messages) {
            Err(error) if error.kind == TemplateErrorKind::Limit => return Ok(Err(error.to_string())),
            rendered => rendered?,
        };
        let ids = match within_memory(rendered.len(), || self.text.encode(&rendered, false)) {
            Err(TextError::Failed(why)) => return Ok(Err(why)),
            ids => or_bos(ids?, &self.manifest.generation)?,
        };
        let (needed, size) = (ids.len(), self.manifest.ctx_size as usize);
        Ok(if needed > size {
            Err(format!("{needed} positions are needed, the executable was built for {size}"))
        } else if needed + reserve > size {
            Err(format!("{needed} positions are needed and {reserve} for an answer, the executable was built for {size}"))
        } else {
            Ok(ids)
        })
    }
}

/// A decoder, and the tokens whose keys and values lie in its slot 0.
struct Slot<'p> {
    decoder: Decoder<'p>,
    held: Vec<u32>,
}

impl Slot<'_> {
    /// Computes `ids` from where they differ from what is held; at least the last one, whose logits are wanted.
    fn feed(&mut self, ids: Vec<u32>) -> Result<(), Failure> {
        let reuse = common_prefix(&self.held, &ids).min(ids.len() - 1);
        self.decoder.truncate(0, reuse);
        self.decoder.feed(0, &ids[reuse..])?;
        self.held = ids;
        Ok(())
    }

    /// Behind what was fed these were generated; the last of them may not have been fed.
    fn holds(&mut self, generated: &[u32]) {
        self.held.extend(generated);
        self.held.truncate(self.decoder.slots().len(0));
    }
}

fn common_prefix(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).take_while(|(a, b)| a == b).count()
}

/// The lines of stdin, with a mark before each where a person types them.
struct Lines {
    stdin: BufReader<Stdin>,
    prompt: Option<Stderr>,
    read: usize,
}

impl Lines {
    fn of_stdin() -> Self {
        Self { stdin: BufReader::new(Stdin), prompt: stdin().is_terminal().then(stderr), read: 0 }
    }

    /// The next line that says something; none at the end of the input and at `/exit`.
    fn next(&mut self) -> Result<Option<String>, Failure> {
        loop {
            if let Some(prompt) = &mut self.prompt {
                // Without stderr there is nobody to prompt.
                let _ = write!(prompt, "> ");
            }
            let mut line = Vec::new();
            let begin = self.read;
            let read = read_within_memory(|most| match line.last() {
                Some(b'\n') => Ok(0),
                _ => (&mut self.stdin).take(most).read_until(b'\n', &mut line),
            });
            self.read += read.map_err(|e| Failure::new(3, "input", format!("stdin: {e}")))?;
            if line.len() as u64 > MAX_INPUT_BYTES {
                return Err(too_large("stdin"));
            }
            let mut line = utf8("stdin", begin, line)?;
            line.truncate(line.trim_end_matches(['\n', '\r']).len());
            if self.read == begin || line == "/exit" {
                return Ok(None);
            }
            if !line.trim().is_empty() {
                return Ok(Some(line));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::step::tests::decoder_session;

    #[test]
    fn prefixes() {
        assert_eq!(common_prefix(&[1, 2, 3], &[1, 2, 4, 5]), 2);
        assert_eq!(common_prefix(&[], &[1]), 0);
    }

    #[test]
    fn a_slot_computes_what_is_new() {
        let mut slot = Slot { decoder: Decoder::new(decoder_session(&[1, 8, 64], 1, 1)), held: Vec::new() };
        slot.feed(vec![1, 2, 3]).unwrap();
        // The last of two generated tokens has no keys and values.
        slot.decoder.feed(0, &[4]).unwrap();
        slot.holds(&[4, 5]);
        assert_eq!((slot.held.as_slice(), slot.decoder.slots().len(0)), ([1, 2, 3, 4].as_slice(), 4));
        slot.feed(vec![1, 2, 9, 9, 9]).unwrap();
        assert_eq!(slot.decoder.slots().len(0), 5);
        // The fake's logits count the tokens that the row sees.
        assert_eq!(slot.decoder.logits(0)[1..10], [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 3.0]);
        // Nothing is new, and still there are logits.
        slot.feed(vec![1, 2, 9]).unwrap();
        assert_eq!(slot.decoder.logits(0)[1..10], [1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0]);
    }
}
