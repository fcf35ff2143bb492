//! Codes of calibrated tensors: written to a file as they are made, and read by the pack stage beside the checkpoint.

use crate::error::Error;
use crate::pack::Tensors;
use rcompile_graph::DType;
use rcompile_graph::quant::CodedRows;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::Seek;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

/// All codes made so far. In the file each row of a tensor is its codes, a byte each, then its scales, f32.
#[derive(Debug)]
pub struct Codes {
    file: File,
    path: PathBuf,
    len: u64,
    tensors: BTreeMap<String, Tensor>,
}

#[derive(Clone, Copy, Debug)]
struct Tensor {
    dtype: DType,
    rows: u64,
    width: usize,
    groups: usize,
    offset: u64,
}

impl Tensor {
    fn row_bytes(&self) -> u64 {
        (self.width + 4 * self.groups) as u64
    }
}

impl Codes {
    /// An empty file in a work directory.
    pub fn create(dir: &Path) -> Result<Codes, Error> {
        let path = dir.join("codes");
        let file = File::options().read(true).write(true).create_new(true).open(&path);
        let file = file.map_err(|e| Error::output(&path, "creating", &e))?;
        Ok(Codes { file, path, len: 0, tensors: BTreeMap::new() })
    }

    /// Room for a tensor, whose rows are then written with [`Codes::write`].
    pub fn add(&mut self, name: &str, dtype: DType, rows: u64, width: usize) {
        let groups = CodedRows { dtype, width, codes: vec![], scales: vec![], zeros: vec![] }.groups();
        let tensor = Tensor { dtype, rows, width, groups, offset: self.len };
        self.len += rows * tensor.row_bytes();
        self.tensors.insert(name.into(), tensor);
    }

    /// Writes rows of a tensor from `first` on.
    pub fn write(&self, name: &str, first: u64, rows: &CodedRows) -> Result<(), Error> {
        let t = self.get(name)?;
        let mut bytes = Vec::with_capacity(rows.codes.len() + 4 * rows.scales.len());
        for (codes, scales) in rows.codes.chunks(t.width).zip(rows.scales.chunks(t.groups)) {
            bytes.extend(codes.iter().map(|c| *c as u8));
            bytes.extend(scales.iter().flat_map(|s| s.to_le_bytes()));
        }
        let at = t.offset + first * t.row_bytes();
        self.file.write_all_at(&bytes, at).map_err(|e| Error::output(&self.path, "writing codes", &e))
    }

    /// The checkpoint with these tensors.
    pub fn over<'t>(&'t self, checkpoint: &'t dyn Tensors) -> Calibrated<'t> {
        Calibrated { codes: self, checkpoint }
    }

    /// BLAKE3 of all codes and scales, in hexadecimal digits.
    pub fn hash(&self) -> Result<String, Error> {
        let mut hasher = blake3::Hasher::new();
        let mut file = &self.file;
        let read = file.rewind().and_then(|()| hasher.update_reader(file).map(|_| ()));
        read.map_err(|e| Error::output(&self.path, "reading codes", &e))?;
        Ok(hasher.finalize().to_hex().to_string())
    }

    fn get(&self, name: &str) -> Result<Tensor, Error> {
        self.tensors.get(name).copied().ok_or_else(|| Error::bug("calibrate", format_args!("no codes of {name}")))
    }
}

/// A checkpoint with given codes beside its own tensors.
pub struct Calibrated<'t> {
    codes: &'t Codes,
    checkpoint: &'t dyn Tensors,
}

impl Tensors for Calibrated<'_> {
    fn info(&self, tensor: &str) -> Option<(DType, Vec<u64>)> {
        match self.codes.tensors.get(tensor) {
            Some(t) => Some((t.dtype, vec![t.rows, t.width as u64])),
            None => self.checkpoint.info(tensor),
        }
    }

    fn read_into(&self, tensor: &str, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        self.checkpoint.read_into(tensor, offset, into)
    }

    fn codes(&self, tensor: &str, rows: Range<u64>) -> Result<CodedRows, Error> {
        let Some(t) = self.codes.tensors.get(tensor) else { return self.checkpoint.codes(tensor, rows) };
        let mut bytes = vec![0; ((rows.end - rows.start) * t.row_bytes()) as usize];
        let read = self.codes.file.read_exact_at(&mut bytes, t.offset + rows.start * t.row_bytes());
        read.map_err(|e| Error::output(&self.codes.path, "reading codes", &e))?;
        let mut coded = CodedRows { dtype: t.dtype, width: t.width, codes: vec![], scales: vec![], zeros: vec![] };
        for row in bytes.chunks(t.row_bytes() as usize) {
            let (codes, scales) = row.split_at(t.width);
            coded.codes.extend(codes.iter().map(|c| *c as i8));
            coded.scales.extend(scales.as_chunks().0.iter().map(|s| f32::from_le_bytes(*s)));
        }
        Ok(coded)
    }

    fn place_of<'a>(&'a self, tensor: &'a str) -> (&'a str, &'a str) {
        self.checkpoint.place_of(tensor)
    }
}
