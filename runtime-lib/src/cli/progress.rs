//! Progress of verbs that read whole files: how much is done and how long the rest will take, on stderr.
//!
//! On a terminal one line that is written anew every second and taken away at the end, elsewhere a line every ten seconds. A run that is
//! over before that says nothing.

use std::io::{self, IsTerminal, Write};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// What is said when. [`Progress::advance`] may be called from any thread.
pub struct Progress {
    /// `windows`, `texts`
    unit: &'static str,
    total: usize,
    start: Instant,
    /// None: with `--quiet`.
    style: Option<Style>,
    state: Mutex<State>,
}

#[derive(Clone, Copy)]
struct Style {
    every: Duration,
    terminal: bool,
}

struct State {
    done: usize,
    said: Instant,
    /// Is there a line on the terminal?
    shown: bool,
    out: Box<dyn Write + Send>,
}

impl Progress {
    /// For `total` pieces of work, called `unit`.
    pub fn new(unit: &'static str, total: usize, quiet: bool) -> Progress {
        // (A dumb one cannot write over a line.)
        let terminal = io::stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        let style = Style { every: Duration::from_secs(if terminal { 1 } else { 10 }), terminal };
        Progress::to(Box::new(io::stderr()), unit, total, (!quiet).then_some(style))
    }

    fn to(out: Box<dyn Write + Send>, unit: &'static str, total: usize, style: Option<Style>) -> Progress {
        let start = Instant::now();
        Progress { unit, total, start, style, state: Mutex::new(State { done: 0, said: start, shown: false, out }) }
    }

    /// Takes the line away, so that what follows stands where it was.
    pub fn hide(&self) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if std::mem::take(&mut state.shown) {
            let _ = write!(state.out, "\r\x1b[K");
        }
    }

    /// One more is done.
    pub fn advance(&self) {
        let Some(style) = self.style else { return };
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        state.done += 1;
        if state.done < self.total && state.said.elapsed() >= style.every {
            state.said = Instant::now();
            let left = self.start.elapsed().as_secs_f64() / state.done as f64 * (self.total - state.done) as f64;
            let line = format!("{} of {} {}, {left:.0} s left", state.done, self.total, self.unit);
            // Without stderr there is nobody to tell.
            state.shown = style.terminal;
            let _ = if style.terminal { write!(state.out, "\r\x1b[K{line}") } else { writeln!(state.out, "{line}") };
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.hide();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    #[derive(Clone, Default)]
    struct Sink(Arc<Mutex<Vec<u8>>>);

    impl Write for Sink {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().extend(bytes);
            Ok(bytes.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn said(total: usize, style: Option<Style>) -> String {
        let sink = Sink::default();
        let progress = Progress::to(Box::new(sink.clone()), "texts", total, style);
        (0..total).for_each(|_| progress.advance());
        drop(progress);
        String::from_utf8(sink.0.lock().unwrap().clone()).unwrap()
    }

    #[test]
    fn lines_say_what_is_done_and_left() {
        let style = |every, terminal| Some(Style { every, terminal });
        assert_eq!(said(3, style(Duration::ZERO, false)), "1 of 3 texts, 0 s left\n2 of 3 texts, 0 s left\n");
        assert_eq!(said(2, style(Duration::ZERO, true)), "\r\x1b[K1 of 2 texts, 0 s left\r\x1b[K");
        assert_eq!(said(3, style(Duration::MAX, true)), "");
        assert_eq!(said(3, None), "");
        // A line is taken away once.
        let sink = Sink::default();
        let progress = Progress::to(Box::new(sink.clone()), "texts", 2, style(Duration::ZERO, true));
        progress.hide();
        progress.advance();
        (0..2).for_each(|_| progress.hide());
        drop(progress);
        assert_eq!(*sink.0.lock().unwrap(), b"\r\x1b[K1 of 2 texts, 0 s left\r\x1b[K");
    }
}
