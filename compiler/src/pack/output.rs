//! The weights area's bytes into the file, in order and in whole large pages.
//!
//! Linux keeps a file's pages in folios as large as the writes that made them, as far as these are aligned; only a folio of 2 MB is mapped
//! as one large page, with one fault. Of a freshly built executable of 2.5 GB nearly all weights are: the first token comes after 0.12
//! instead of 0.18 s.

use super::Sink;
use crate::error::Error;
use std::os::unix::fs::FileExt;

/// Bytes of a large page, and of a write.
const BLOCK: usize = 2 << 20;

/// See the module's doc.
pub struct Output<'a> {
    sink: Sink<'a>,
    /// File offset of the first byte that is not written.
    at: u64,
    /// Bytes up to the next multiple of a block that wait for more.
    waiting: Vec<u8>,
}

impl<'a> Output<'a> {
    /// Starts at the sink's base.
    pub fn new(sink: Sink<'a>) -> Self {
        Self { sink, at: sink.base, waiting: Vec::with_capacity(BLOCK) }
    }

    /// Appends bytes. Errors: writing (8).
    pub fn write(&mut self, mut bytes: &[u8]) -> Result<(), Error> {
        while !bytes.is_empty() {
            let room = BLOCK - (self.at as usize + self.waiting.len()) % BLOCK;
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.waiting.extend_from_slice(now);
            if now.len() == room {
                self.finish()?;
            }
            bytes = later;
        }
        Ok(())
    }

    /// Writes what waits. Errors: writing (8).
    pub fn finish(&mut self) -> Result<(), Error> {
        self.sink.file.write_all_at(&self.waiting, self.at).map_err(|e| Error::output(self.sink.path, "writing weights", &e))?;
        self.at += self.waiting.len() as u64;
        self.waiting.clear();
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    #[test]
    fn whole_blocks_whatever_the_pieces() {
        let file = tempfile::tempfile().unwrap();
        let base = 5000;
        let mut output = Output::new(Sink { file: &file, path: Path::new("test"), base });
        let bytes: Vec<u8> = (0..2 * BLOCK + 77_777).map(|i| (i % 253) as u8).collect();
        let mut rest = &bytes[..];
        for piece in [1, 0, BLOCK - 5002, 2, BLOCK + 3, 70_000].into_iter().cycle() {
            let (now, later) = rest.split_at(piece.min(rest.len()));
            output.write(now).unwrap();
            assert!(output.at == base || output.at.is_multiple_of(BLOCK as u64), "a write ended at {}", output.at);
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        output.finish().unwrap();
        let mut found = vec![0; bytes.len()];
        file.read_exact_at(&mut found, base).unwrap();
        assert!(found == bytes && file.metadata().unwrap().len() == base + bytes.len() as u64);
    }
}
