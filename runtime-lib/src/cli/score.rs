//! `logits` and `perplexity`: what the model thinks of a text.

use std::io;
use std::path::Path;

use clap::ArgMatches;
use serde::Serialize;

use super::Cx;
use super::answer::or_bos;
use super::args::{LogitsArgs, PerplexityArgs};
use super::error::{Failure, warn_unless_finite};
use super::input::{Input, input};
use super::output::{self, OutputFile};
use super::progress::Progress;
use super::streams::{input_name, print, print_json, read_text, within_memory};
use crate::decode::Decoder;
use crate::logits::{Header, LogitsWriter, Row, WINDOW};
use crate::sample::{nll, top};

pub(super) fn logits(cx: &Cx, args: &LogitsArgs, flags: &ArgMatches) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Report {
        tokens: Vec<u32>,
        top: Vec<(u32, f32)>,
    }
    let tokens = match input(&args.input, flags, "FILE")? {
        Input::Tokens(tokens) => tokens,
        Input::Prompt(text) | Input::File(text) => {
            let tokenizer = cx.load_text()?.wait()?;
            within_memory(text.len(), || tokenizer.encode(&text, true))?
        }
    };
    let tokens = or_bos(tokens, &cx.manifest().generation)?;
    let mut decoder = Decoder::new(cx.session(&args.machine)?);
    decoder.feed(0, &tokens)?;
    warn_unless_finite(decoder.logits(0));
    let top = top(decoder.logits(0), args.top);
    if args.json {
        return print_json(&Report { tokens, top });
    }
    print(&top.iter().map(|(id, logit)| format!("{id}\t{logit}\n")).collect::<String>())
}

pub(super) fn perplexity(cx: &Cx, args: &PerplexityArgs) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Report {
        tokens: usize,
        nll: f64,
        ppl: f64,
    }
    let ctx_size = cx.manifest().ctx_size as usize;
    let window = args.window.unwrap_or(ctx_size.min(WINDOW as usize));
    if window > ctx_size {
        return Err(Failure::new(7, "context", format!("a window of {window} tokens, the executable was built for {ctx_size}"))
            .help("use a smaller -c, or build with a larger --ctx-size"));
    }
    let inputs = || [cx.payload.files(), vec![args.file.clone()]].concat();
    let logits = args.logits.as_ref().map(|path| OutputFile::create(path, &inputs())).transpose()?;
    let loading = cx.load_text()?;
    let source = read_text(Some(&args.file))?;
    let mut decoder = Decoder::new(cx.session(&args.machine)?);
    let text = loading.wait()?;
    let (leading, _) = text.special_around()?;
    let ids = within_memory(source.len(), || text.encode(&source, false))?;
    let windows = windows(&ids, &leading, window)?;
    let count = windows.len().min(args.chunks.unwrap_or(usize::MAX));
    let positions = count as u64 * (window as u64 - 1);
    if positions == 0 {
        return Err(Failure::usage(format!("{}: {} tokens do not fill a window of {window}", input_name(Some(&args.file)), ids.len()))
            .help("give a longer text or a smaller -c"));
    }
    let header = Header { vocab_size: cx.manifest().vocab_size, window: window as u32, positions };
    let failed = |e: io::Error| output::failed(args.logits.as_deref().unwrap_or(Path::new("")), e);
    let mut rows = logits.map(|file| LogitsWriter::new(file, header)).transpose().map_err(failed)?;
    let (mut sum, mut tokens) = (0.0, 0);
    let progress = Progress::new("windows", count, args.quiet);
    for window in windows.take(count) {
        decoder.truncate(0, 0);
        let mut written = Ok(());
        // The last token's logits predict what lies outside of the window.
        decoder.score(0, &window[..window.len() - 1], |i, logits| {
            let scored = nll(logits, window[i + 1]);
            warn_unless_finite(&[scored as f32]);
            sum += scored;
            tokens += 1;
            if let (Some(rows), true) = (&mut rows, written.is_ok()) {
                written = rows.row(Row { token: window[i], next: window[i + 1], logits });
            }
        })?;
        written.map_err(failed)?;
        progress.advance();
    }
    drop(progress);
    if let Some(rows) = rows {
        rows.finish().and_then(OutputFile::finish).map_err(failed)?;
    }
    let nll = sum / tokens as f64;
    let report = Report { tokens, nll, ppl: nll.exp() };
    if args.json {
        return print_json(&report);
    }
    print(&format!("{} tokens, nll {:.6}, perplexity {:.5}\n", report.tokens, report.nll, report.ppl))
}

/// Full windows of `window` tokens side by side, each with the leading special tokens in front, which count.
fn windows<'t>(ids: &'t [u32], leading: &'t [u32], window: usize) -> Result<impl ExactSizeIterator<Item = Vec<u32>> + 't, Failure> {
    let room = window
        .checked_sub(leading.len())
        .filter(|&r| r > 0)
        .ok_or_else(|| Failure::usage(format!("-c: expected more than {} tokens, found {window}", leading.len())))?;
    Ok(ids.chunks_exact(room).map(move |part| [leading, part].concat()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_count_bos_and_drop_the_rest() {
        let ids: Vec<u32> = (10..21).collect();
        let all = |leading: &[u32], window| -> Vec<Vec<u32>> { windows(&ids, leading, window).unwrap().collect() };
        let with = all(&[1], 4);
        assert_eq!(with.len(), 3);
        assert_eq!(with[0], [1, 10, 11, 12]);
        assert_eq!(with[2], [1, 16, 17, 18]);
        assert_eq!(all(&[], 4).len(), 2);
        assert!(all(&[], 12).is_empty());
        assert!(windows(&ids, &[1, 2], 2).is_err());
    }
}
