//! The stream of logits that `OUT perplexity --logits FILE` writes and `rcompile compare` reads.
//!
//! Little-endian, without padding; a row per scored position, in the order of the text:
//! ```text
//! header   magic "RCLOGIT1", vocab_size: u32, window: u32, positions: u64          24 bytes
//! row      token: u32, next: u32, logits: f32[vocab_size]                          positions times
//! ```
//! `logits` are the model's after it has read `token`, as computed and without softmax; `next` is the token that follows in the text, the
//! one that is scored. Windows are `window` tokens long and do not overlap, so each has `window - 1` rows. What is read comes from a
//! file or a pipe that anybody may have written: it is checked, and nothing larger than a row is held.

use std::io::{self, ErrorKind, Read, Write};

/// Tokens of a window, where nothing is said and the context is not shorter.
pub const WINDOW: u32 = 512;

/// The first bytes. The digit is the version.
const MAGIC: [u8; 8] = *b"RCLOGIT1";
/// Bytes of the header.
const HEADER_BYTES: usize = 24;
/// Bytes of a row before its logits.
const ROW_HEAD_BYTES: usize = 8;
/// No vocabulary is larger; a stream that says so is not ours.
const VOCAB_MAX: u32 = 1 << 24;

/// What a stream holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Logits of a row.
    pub vocab_size: u32,
    /// Tokens of a window, special ones included.
    pub window: u32,
    /// Rows.
    pub positions: u64,
}

/// One scored position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Row<'r> {
    /// The last token that the model has read.
    pub token: u32,
    /// The token that follows in the text, below the vocabulary's size.
    pub next: u32,
    /// `f32[vocab_size]`.
    pub logits: &'r [f32],
}

/// Why a stream cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum LogitsError {
    /// It ends too early.
    #[error("ends within {0}")]
    Ended(String),
    /// It is something else.
    #[error("{0}")]
    Malformed(String),
    /// The file or pipe fails.
    #[error("cannot be read: {0}")]
    Io(io::Error),
}

/// Writes a stream.
#[derive(Debug)]
pub struct LogitsWriter<W> {
    out: W,
    header: Header,
    written: u64,
    /// Bytes of a row.
    row: Vec<u8>,
}

impl<W: Write> LogitsWriter<W> {
    /// Writes the header; `header.positions` rows have to follow.
    pub fn new(mut out: W, header: Header) -> io::Result<Self> {
        let Header { vocab_size, window, positions } = header;
        let bytes = [&MAGIC[..], &vocab_size.to_le_bytes(), &window.to_le_bytes(), &positions.to_le_bytes()].concat();
        out.write_all(&bytes)?;
        Ok(Self { out, header, written: 0, row: Vec::with_capacity(ROW_HEAD_BYTES + 4 * vocab_size as usize) })
    }

    /// Writes the next row. `row.logits` has to be as long as the vocabulary.
    pub fn row(&mut self, row: Row<'_>) -> io::Result<()> {
        assert_eq!(row.logits.len(), self.header.vocab_size as usize, "a row has a logit per token of the vocabulary");
        self.row.clear();
        self.row.extend(row.token.to_le_bytes());
        self.row.extend(row.next.to_le_bytes());
        self.row.extend(row.logits.iter().flat_map(|x| x.to_le_bytes()));
        self.written += 1;
        self.out.write_all(&self.row)
    }

    /// Ends the stream and returns what it was written into.
    pub fn finish(mut self) -> io::Result<W> {
        assert_eq!(self.written, self.header.positions, "as many rows as the header says");
        self.out.flush()?;
        Ok(self.out)
    }
}

/// Reads a stream row by row.
#[derive(Debug)]
pub struct LogitsReader<R> {
    input: R,
    header: Header,
    read: u64,
    bytes: Vec<u8>,
    logits: Vec<f32>,
}

impl<R: Read> LogitsReader<R> {
    /// Reads the header.
    pub fn new(mut input: R) -> Result<Self, LogitsError> {
        let mut head = [0; HEADER_BYTES];
        fill(&mut input, &mut head, || "the header".into())?;
        let word = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| head[at + i]));
        let header = Header { vocab_size: word(8), window: word(12), positions: u64::from(word(16)) | (u64::from(word(20)) << 32) };
        if head[..8] != MAGIC {
            return Err(LogitsError::Malformed("is no stream of logits: expected it to begin with RCLOGIT1".into()));
        }
        if !(1..=VOCAB_MAX).contains(&header.vocab_size) {
            return Err(LogitsError::Malformed(format!("vocabulary: expected 1 to {VOCAB_MAX} tokens, found {}", header.vocab_size)));
        }
        let rows = u64::from(header.window).saturating_sub(1);
        if rows == 0 || header.positions == 0 || !header.positions.is_multiple_of(rows) {
            let Header { window, positions, .. } = header;
            return Err(LogitsError::Malformed(format!("expected windows of {window} tokens to fill the positions, found {positions}")));
        }
        let vocab = header.vocab_size as usize;
        Ok(Self { input, header, read: 0, bytes: vec![0; ROW_HEAD_BYTES + 4 * vocab], logits: vec![0.0; vocab] })
    }

    /// What the stream holds.
    pub fn header(&self) -> Header {
        self.header
    }

    /// The next row; none behind the last one, where the stream has to end.
    pub fn row(&mut self) -> Result<Option<Row<'_>>, LogitsError> {
        let (at, positions) = (self.read, self.header.positions);
        if at == positions {
            return match self.input.read(&mut [0]) {
                Ok(0) => Ok(None),
                Ok(_) => Err(LogitsError::Malformed(format!("goes on behind its {positions} positions"))),
                Err(e) if e.kind() == ErrorKind::Interrupted => self.row(),
                Err(e) => Err(LogitsError::Io(e)),
            };
        }
        fill(&mut self.input, &mut self.bytes, || format!("position {at} of {positions}"))?;
        self.read += 1;
        let (words, _) = self.bytes.as_chunks::<4>();
        let (token, next) = (u32::from_le_bytes(words[0]), u32::from_le_bytes(words[1]));
        let vocab = self.header.vocab_size;
        if token >= vocab || next >= vocab {
            return Err(LogitsError::Malformed(format!("position {at}: expected tokens below {vocab}, found {token} and {next}")));
        }
        self.logits.iter_mut().zip(&words[2..]).for_each(|(x, bytes)| *x = f32::from_le_bytes(*bytes));
        Ok(Some(Row { token, next, logits: &self.logits }))
    }
}

fn fill(input: &mut impl Read, into: &mut [u8], place: impl Fn() -> String) -> Result<(), LogitsError> {
    input.read_exact(into).map_err(|e| match e.kind() {
        ErrorKind::UnexpectedEof => LogitsError::Ended(place()),
        _ => LogitsError::Io(e),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEADER: Header = Header { vocab_size: 3, window: 3, positions: 2 };
    const ROWS: [(u32, u32, [f32; 3]); 2] = [(0, 2, [1.0, -2.5, 3.0]), (2, 1, [0.0, f32::MIN_POSITIVE, f32::NEG_INFINITY])];

    fn stream() -> Vec<u8> {
        let mut bytes = Vec::new();
        let mut writer = LogitsWriter::new(&mut bytes, HEADER).unwrap();
        for (token, next, logits) in &ROWS {
            writer.row(Row { token: *token, next: *next, logits }).unwrap();
        }
        writer.finish().unwrap();
        bytes
    }

    /// Everything that the stream holds, or the error's text.
    fn read(bytes: &[u8]) -> Result<Vec<(u32, u32, Vec<f32>)>, String> {
        let mut reader = LogitsReader::new(bytes).map_err(|e| e.to_string())?;
        let mut rows = Vec::new();
        while let Some(row) = reader.row().map_err(|e| e.to_string())? {
            rows.push((row.token, row.next, row.logits.to_vec()));
        }
        Ok(rows)
    }

    #[test]
    fn what_was_written_is_read() {
        let bytes = stream();
        assert_eq!(bytes.len(), HEADER_BYTES + 2 * (ROW_HEAD_BYTES + 12));
        assert_eq!(bytes[..12], *b"RCLOGIT1\x03\0\0\0");
        assert_eq!(LogitsReader::new(&bytes[..]).unwrap().header(), HEADER);
        assert_eq!(read(&bytes).unwrap(), ROWS.map(|(token, next, logits)| (token, next, logits.to_vec())));
        // More positions than 32 bits count.
        let (mut bytes, header) = (Vec::new(), Header { positions: (1 << 32) + 2, ..HEADER });
        LogitsWriter::new(&mut bytes, header).unwrap();
        assert_eq!(LogitsReader::new(&bytes[..]).unwrap().header(), header);
    }

    #[test]
    fn whatever_is_cut_or_changed_is_refused() {
        let bytes = stream();
        for len in 0..bytes.len() {
            let text = read(&bytes[..len]).unwrap_err();
            let place = if len < HEADER_BYTES { "the header" } else { ["position 0 of 2", "position 1 of 2"][(len - HEADER_BYTES) / 20] };
            assert_eq!(text, format!("ends within {place}"), "{len} bytes");
        }
        assert!(read(&[&bytes[..], b"x"].concat()).unwrap_err().contains("goes on behind its 2 positions"));
        let with = |at: usize, word: u32| {
            let mut bytes = bytes.clone();
            bytes[at..at + 4].copy_from_slice(&word.to_le_bytes());
            read(&bytes).unwrap_err()
        };
        assert!(with(4, 0).contains("is no stream of logits"));
        // Refused before anything of that size is allocated.
        assert!(with(8, u32::MAX).contains("vocabulary") && with(8, 0).contains("vocabulary"));
        assert!(with(12, 4).contains("fill the positions") && with(12, 1).contains("fill") && with(12, 0).contains("fill"));
        assert!(with(16, 0).contains("fill the positions"));
        assert!(with(24, 3).contains("tokens below 3, found 3 and 2") && with(48, 9).contains("position 1: expected tokens below 3"));
        assert!(with(28, 3).contains("tokens below 3, found 0 and 3"));
    }
}
