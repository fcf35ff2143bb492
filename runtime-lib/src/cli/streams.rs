//! Streams of a verb: inputs that are read whole, and stdout.
//!
//! Whoever started this process may have made its streams non-blocking: what has or takes nothing now is waited for.

use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::path::Path;

use rustix::event::{PollFd, PollFlags, poll};

use super::error::Failure;
use crate::memory;

/// Most bytes of an input file.
pub(super) const MAX_INPUT_BYTES: u64 = 1 << 30;
/// Bytes of an input for which nobody need ask whether there is memory.
pub(super) const SHORT_INPUT_BYTES: u64 = 1 << 20;

/// A file as text; `-`, or none, is stdin.
pub(super) fn read_text(path: Option<&Path>) -> Result<String, Failure> {
    let name = input_name(path);
    let path = path.filter(|path| *path != Path::new("-"));
    let failed = |e: std::io::Error| Failure::new(3, "input", format!("{name}: {e}"));
    let mut bytes = Vec::new();
    let mut reader: &mut dyn Read = match path {
        Some(path) => &mut std::fs::File::open(path).map_err(failed)?,
        None => &mut Stdin,
    };
    read_within_memory(|most| (&mut reader).take(most).read_to_end(&mut bytes)).map_err(failed)?;
    if bytes.len() as u64 > MAX_INPUT_BYTES {
        return Err(too_large(&name));
    }
    utf8(&name, 0, bytes)
}

/// Reads an input by `read`, which is told how many bytes it may take, and called again where the first were not all. What follows them
/// has to fit into what the control group leaves. Returns the number of bytes: one more than [`MAX_INPUT_BYTES`] where there are more.
pub(super) fn read_within_memory(mut read: impl FnMut(u64) -> io::Result<usize>) -> io::Result<usize> {
    let first = read(SHORT_INPUT_BYTES)?;
    if (first as u64) < SHORT_INPUT_BYTES {
        return Ok(first);
    }
    Ok(first + within_memory(first, || read(MAX_INPUT_BYTES + 1 - SHORT_INPUT_BYTES))?)
}

/// What `part` gives of an input of so many bytes. Cutting it into lines and ids takes some tens of bytes for each, which may be more than
/// the control group leaves.
pub(super) fn within_memory<R>(input_bytes: usize, part: impl FnOnce() -> R) -> R {
    if (input_bytes as u64) < SHORT_INPUT_BYTES { part() } else { memory::within_control_group(part) }
}

/// What an input is called in errors: none and `-` are standard input.
pub(super) fn input_name(path: Option<&Path>) -> String {
    path.filter(|path| *path != Path::new("-")).map_or("stdin".into(), |path| path.display().to_string())
}

/// More than [`MAX_INPUT_BYTES`].
pub(super) fn too_large(name: &str) -> Failure {
    Failure::new(7, "input", format!("{name}: expected at most {MAX_INPUT_BYTES} bytes, found more"))
}

/// The bytes of an input from byte `begin` on, as text.
pub(super) fn utf8(name: &str, begin: usize, bytes: Vec<u8>) -> Result<String, Failure> {
    String::from_utf8(bytes).map_err(|e| {
        let at = begin + e.utf8_error().valid_up_to();
        Failure::new(4, "input", format!("{name}: not UTF-8 at byte {at}"))
    })
}

/// Prints data.
pub(super) fn print(text: &str) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    let mut rest = text.as_bytes();
    while !rest.is_empty() {
        let written = when_ready(&io::stdout(), PollFlags::OUT, || out.write(rest))?;
        rest = &rest[written..];
    }
    Ok(when_ready(&io::stdout(), PollFlags::OUT, || out.flush())?)
}

/// Standard input as bytes.
pub(super) struct Stdin;

impl Read for Stdin {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        when_ready(&io::stdin(), PollFlags::IN, || io::stdin().lock().read(bytes))
    }
}

/// Reads or writes a stream that whoever started this process may have made non-blocking: then waits until it has or takes more.
fn when_ready<T>(stream: &impl AsFd, ready: PollFlags, mut operation: impl FnMut() -> io::Result<T>) -> io::Result<T> {
    loop {
        match operation() {
            Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                // An error or a signal shows at the next operation.
                let _ = poll(&mut [PollFd::new(stream, ready)], None);
            }
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            done => return done,
        }
    }
}

/// Prints one JSON value on one line.
pub(super) fn print_json(value: &impl serde::Serialize) -> Result<(), Failure> {
    let mut line = serde_json::to_string(value).map_err(Failure::bug)?;
    line.push('\n');
    print(&line)
}

/// Ids as they are given to `--tokens`.
pub(super) fn joined(ids: &[u32]) -> String {
    let words: Vec<String> = ids.iter().map(u32::to_string).collect();
    words.join(",")
}
