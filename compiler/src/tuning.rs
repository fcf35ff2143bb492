//! `--tuning FILE`: tiles of matmuls that were measured, in place of the planner's heuristic.
//!
//! In: a JSON file, written by `--autotune fast` or by hand. Out: [`Tuning`], which the planner asks for each matmul.
//!
//! ```text
//! { "rcompile_tuning": 8, "target": "x86_64-unknown-linux-gnu", "cpu": "znver5", "features": "+avx2,+avx512bf16,..",
//!   "matmuls": [ { "rows": 1, "weights": "bf16", "compute": "bf16_dot", "k": 2048, "n": 8192, "ways": 2,
//!                  "tile": { .. fields of MatmulTile .. } }, .. ] }
//! ```
//! `rows` is the most rows that the matmul gets in its bucket, `weights` is f32, f16, bf16, int8, or bits and group of codes (int4g32,
//! int8g128z: with zero points), `n` counts the columns of one way (`ways` 2: gate and up in one). The same file gives the same executable.
//! A file for another CPU, a field that is missing or not known, a matmul that is named twice and a tile that no kernel can have are
//! refused; a matmul without an entry has the heuristic's tile, and entries without a matmul are warned about. No choice changes a bit of
//! any result: each output element is one chain over k in every tile.

use crate::emit;
use crate::error::{Error, warning};
use crate::input;
use rcompile_codegen::isa::{Distances, Isa};
use rcompile_codegen::program::{Coding, Compute, DType, Kernel, Matmul, MatmulTile, Panels, Program};
use rcompile_models::dir::{InputFile, sha256_hex};
use rcompile_models::{Error as ModelError, Kind};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::HashSet;
use std::path::Path;

/// Version of the format.
const VERSION: u32 = 8;
/// Larger files are refused before they are parsed.
const BYTES_MAX: u64 = 4 << 20;
/// The flag, and the file's name among the inputs that `info` lists.
const INPUT_NAME: &str = "--tuning";

/// What the tile of a matmul is chosen by.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MatmulKey {
    /// Most rows.
    pub rows: u64,
    /// Name of the weights' type, see [`Coding::name`].
    pub weights: String,
    /// Arithmetic.
    pub compute: Compute,
    /// Inner dimension.
    pub k: u32,
    /// Columns of one way.
    pub n: u32,
    /// Interleaved matrices.
    pub ways: u32,
}

impl MatmulKey {
    /// The key of a planned matmul.
    pub fn new(rows: u64, panels: &Panels, weights: DType, compute: Compute) -> MatmulKey {
        let (weights, n) = (panels.coding.name(weights), panels.groups * panels.group_cols);
        MatmulKey { rows, weights, compute, k: panels.k, n, ways: panels.ways }
    }
}

/// A program's matmuls with their keys, in the order of its regions.
pub fn matmuls(program: &Program) -> impl Iterator<Item = (MatmulKey, &Matmul)> {
    program.regions.iter().filter_map(|region| match &region.kernel {
        Kernel::Matmul(m) => {
            let dtype = program.weights[m.weight.index()].dtype;
            Some((MatmulKey::new(program.capacity(m.rows).into(), &m.panels, dtype, m.compute), &**m))
        }
        _ => None,
    })
}

/// A choice.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    rows: u64,
    #[serde(deserialize_with = "weights")]
    weights: String,
    #[serde(with = "compute")]
    compute: Compute,
    k: u32,
    n: u32,
    ways: u32,
    tile: MatmulTile,
}

impl Entry {
    fn new(key: MatmulKey, tile: MatmulTile) -> Entry {
        let MatmulKey { rows, weights, compute, k, n, ways } = key;
        Entry { rows, weights, compute, k, n, ways, tile }
    }
    fn key(&self) -> MatmulKey {
        let Entry { rows, weights, compute, k, n, ways, .. } = self.clone();
        MatmulKey { rows, weights, compute, k, n, ways }
    }
}

/// Choices for one CPU.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tuning {
    entries: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct File {
    rcompile_tuning: u32,
    target: String,
    cpu: String,
    features: String,
    matmuls: Vec<Entry>,
}

impl Tuning {
    /// The tile of a matmul, if it was tuned.
    pub fn matmul(&self, key: &MatmulKey) -> Option<MatmulTile> {
        self.entries.iter().find(|e| e.key() == *key).map(|e| e.tile)
    }

    /// What to say where choices are for matmuls that none of the programs has.
    pub fn unused<'p>(&self, programs: impl Iterator<Item = &'p Program>) -> Option<String> {
        let there: HashSet<MatmulKey> = programs.flat_map(matmuls).map(|(key, _)| key).collect();
        let unused: Vec<&Entry> = self.entries.iter().filter(|e| !there.contains(&e.key())).collect();
        let Entry { rows, weights, compute, k, n, ways, .. } = unused.first()?;
        let (unused, all, compute) = (unused.len(), self.entries.len(), compute.name());
        let what = format!(
            "{unused} of {all} entries are for matmuls that are not in this build; the first: rows {rows}, weights {weights}, compute {compute}, \
             k {k}, n {n}, ways {ways}"
        );
        Some(warning("tuning", "--tuning", &what))
    }

    /// Adds a choice, or replaces the one for the same matmul.
    pub fn set(&mut self, key: MatmulKey, tile: MatmulTile) {
        self.entries.retain(|e| e.key() != key);
        self.entries.push(Entry::new(key, tile));
    }

    /// Writes a file where a path is given. Out: what the executable says about it.
    pub fn write(&self, path: Option<&Path>, isa: &Isa) -> Result<InputFile, Error> {
        let text = self.text(isa)?;
        if let Some(path) = path {
            emit::write_whole(path, text.as_bytes())?;
        }
        Ok(input_file(text.as_bytes()))
    }

    /// Reads a file for `isa`, and what the executable says about it. Errors: unreadable (3), malformed (4), another CPU or a tile that
    /// cannot be (5), another version (6), too large (7).
    pub fn read(path: &Path, isa: &Isa) -> Result<(Tuning, InputFile), Error> {
        let name = path.display().to_string();
        let refuse = |kind, field: &str, what: &str, expected: &str, found: &str| {
            Err(input::wrong(ModelError::new(kind, name.as_str(), field, what, expected, found)))
        };
        let bytes = input::read(INPUT_NAME, path, BYTES_MAX, "--tuning takes a file that --autotune fast --tuning FILE wrote")?;
        let version = serde_json::from_slice::<serde_json::Value>(&bytes).ok().and_then(|v| v.get("rcompile_tuning")?.as_u64());
        if let Some(version) = version.filter(|v| *v != u64::from(VERSION)) {
            return refuse(Kind::Unsupported, "rcompile_tuning", "is another version", &VERSION.to_string(), &version.to_string());
        }
        let file: File = match serde_json::from_slice(&bytes) {
            Ok(file) => file,
            Err(e) => {
                return refuse(Kind::Malformed, "file", "is no tuning file", "what --autotune fast --tuning FILE writes", &e.to_string());
            }
        };
        // A CPU may have others of its features left out, by a hypervisor or by --cpu-features, and other registers and panels then.
        let features = isa.feature_string();
        for (field, expected, found) in
            [("target", &isa.triple, &file.target), ("cpu", &isa.name, &file.cpu), ("features", &features, &file.features)]
        {
            if expected != found {
                return refuse(Kind::Disagree, field, "is not what is compiled for", expected, found);
            }
        }
        let mut named = HashSet::new();
        for (i, entry) in file.matmuls.iter().enumerate() {
            let field = |name: &str| format!("matmuls[{i}].{name}");
            if !named.insert(entry.key()) {
                return refuse(Kind::Disagree, &field("k"), "names a matmul twice", "one entry for each", "two");
            }
            if let Some(limit) = limits(isa, entry).iter().find(|limit| !limit.holds()) {
                let (field, found) = (field(&format!("tile.{}", limit.field)), limit.value.to_string());
                return refuse(Kind::Disagree, &field, "is no possible value", &limit.expected(), &found);
            }
        }
        Ok((Tuning { entries: file.matmuls }, input_file(&bytes)))
    }

    /// The file's text.
    pub fn text(&self, isa: &Isa) -> Result<String, Error> {
        let file = File {
            rcompile_tuning: VERSION,
            target: isa.triple.clone(),
            cpu: isa.name.clone(),
            features: isa.feature_string(),
            matmuls: self.entries.clone(),
        };
        serde_json::to_string_pretty(&file).map(|text| text + "\n").map_err(|e| Error::bug("tuning", e))
    }
}

fn input_file(bytes: &[u8]) -> InputFile {
    InputFile { name: INPUT_NAME.into(), bytes: bytes.len() as u64, sha256: sha256_hex(bytes) }
}

/// What a number of a tile can be.
struct Limit {
    field: &'static str,
    value: u32,
    least: u32,
    most: u32,
    multiple_of: u32,
}

impl Limit {
    fn holds(&self) -> bool {
        (self.least..=self.most).contains(&self.value) && self.value.is_multiple_of(self.multiple_of)
    }
    fn expected(&self) -> String {
        let multiple = if self.multiple_of > 1 { format!(", a multiple of {}", self.multiple_of) } else { String::new() };
        format!("{} to {}{multiple}", self.least, self.most)
    }
}

/// Limits of the numbers of a tile.
fn limits(isa: &Isa, entry: &Entry) -> Vec<Limit> {
    let (tile, fetch) = (&entry.tile, &entry.tile.fetch);
    let range = |field, value, least, most| Limit { field, value, least, most, multiple_of: 1 };
    let distance = |field, value| Limit { field, value, least: 0, most: 1 << 20, multiple_of: 64 };
    let padded_k = entry.k.checked_next_multiple_of(padding(&entry.weights)).unwrap_or(0);
    // Each pass has several blocks of rows.
    let pass_rows = if tile.m_block == 0 { 0 } else { tile.mr.saturating_mul(2).saturating_add(1) };
    let mut limits = vec![
        range("mr", tile.mr, 1, isa.rows(entry.compute)),
        range("block_mr", tile.block_mr, 1, tile.mr),
        Limit { field: "k_block", value: tile.k_block, least: 0, most: padded_k, multiple_of: 2 },
        range("m_block", tile.m_block, pass_rows, 1 << 20),
        range("n_block", tile.n_block, 1, 1 << 16),
        range("fetch.streams", fetch.streams, 1, 64),
        distance("fetch.ahead.l2", fetch.ahead.l2),
        distance("fetch.ahead.l1", fetch.ahead.l1),
    ];
    if let Some(busy) = fetch.busy {
        limits.extend([range("fetch.busy.rows", busy.rows, 1, 64), distance("fetch.busy.l1", busy.l1)]);
    }
    if let Some(near) = fetch.near {
        let Distances { l2, l1 } = near.ahead;
        limits.extend([
            range("fetch.near.streams", near.streams, 1, 64),
            distance("fetch.near.ahead.l2", l2),
            distance("fetch.near.ahead.l1", l1),
        ]);
    }
    limits
}

/// Names that weights can have, and what blocks of their k are a multiple of at most: groups of codes are whole.
fn known_weights() -> impl Iterator<Item = (String, u32)> {
    let elements = [DType::F32, DType::F16, DType::Bf16].map(|dtype| (Coding::Elements.name(dtype), 2));
    let int8 = [(Coding::Int8 { group: 256 }.name(DType::U8), 256)];
    let by_groups = [32, 64, 128].into_iter().flat_map(|group| {
        let with = |zeros| [Coding::Int8Groups { group, zeros }, Coding::Int4 { group, zeros }];
        [with(false), with(true)].into_iter().flatten().map(move |coding| (coding.name(DType::U8), group))
    });
    elements.into_iter().chain(int8).chain(by_groups)
}

/// What blocks of k of these weights are a multiple of at most.
fn padding(weights: &str) -> u32 {
    known_weights().find(|(name, _)| name == weights).map_or(2, |(_, padding)| padding)
}

/// A name that weights can have.
fn weights<'de, D: Deserializer<'de>>(d: D) -> Result<String, D::Error> {
    let name = String::deserialize(d)?;
    match known_weights().any(|(known, _)| known == name) {
        true => Ok(name),
        false => Err(D::Error::custom(format!("weights: expected f32, f16, bf16, int8, int4g32 or the like, found {name}"))),
    }
}

/// By [`Compute::name`].
mod compute {
    use super::{Compute, Deserialize, Deserializer};
    use serde::{Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(compute: &Compute, s: S) -> Result<S::Ok, S::Error> {
        s.serialize_str(compute.name())
    }
    pub(super) fn deserialize<'de, D: Deserializer<'de>>(d: D) -> Result<Compute, D::Error> {
        let name = String::deserialize(d)?;
        Compute::ALL
            .into_iter()
            .find(|compute| compute.name() == name)
            .ok_or_else(|| D::Error::custom(format!("compute: expected {}, found {name}", Compute::ALL.map(Compute::name).join(", "))))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rcompile_codegen::isa::{Near, X86_64_TRIPLE};
    use rcompile_codegen::program::{BusyRows, Fetch};

    fn isa() -> Isa {
        Isa::lookup(X86_64_TRIPLE, "x86-64-v4", &[]).unwrap()
    }

    fn sample() -> (MatmulKey, MatmulTile) {
        let key = MatmulKey { rows: 8, weights: "bf16".into(), compute: Compute::F32, k: 64, n: 96, ways: 2 };
        (
            key,
            MatmulTile {
                mr: 8,
                block_mr: 6,
                k_block: 0,
                m_block: 0,
                n_block: 4,
                widen: true,
                fetch: Fetch {
                    streams: 6,
                    ahead: Distances { l2: 4096, l1: 1024 },
                    past_l2: true,
                    busy: Some(BusyRows { rows: 7, l1: 3072 }),
                    near: Some(Near { streams: 3, ahead: Distances { l2: 2048, l1: 768 } }),
                },
            },
        )
    }

    fn read(text: &str) -> Result<Tuning, Error> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("tuning.json");
        std::fs::write(&path, text).unwrap();
        Tuning::read(&path, &isa()).map(|t| t.0)
    }

    #[test]
    fn written_and_read() {
        let (key, tile) = sample();
        let mut tuning = Tuning::default();
        tuning.set(key.clone(), MatmulTile { block_mr: 1, ..tile });
        tuning.set(key.clone(), tile);
        let other = MatmulKey { rows: 1, ..key.clone() };
        tuning.set(other, MatmulTile { n_block: 5, ..tile });
        let text = tuning.text(&isa()).unwrap();
        let back = read(&text).unwrap();
        assert_eq!(back, tuning);
        assert_eq!((back.matmul(&key), back.matmul(&MatmulKey { ways: 1, ..key })), (Some(tile), None));
        assert_eq!(back.entries.len(), 2);
    }

    #[test]
    fn weights_of_every_type_have_entries_of_their_own() {
        let groups = || [32, 64, 128].into_iter();
        let by_groups = groups().flat_map(|group| {
            let codings = |zeros| [Coding::Int8Groups { group, zeros }, Coding::Int4 { group, zeros }];
            [codings(false), codings(true)].concat()
        });
        let codes = by_groups.chain([Coding::Int8 { group: 256 }]).map(|coding| (DType::U8, coding));
        let all: Vec<_> = [DType::F32, DType::F16, DType::Bf16].map(|dtype| (dtype, Coding::Elements)).into_iter().chain(codes).collect();
        let keys: Vec<_> = all
            .iter()
            .map(|&(dtype, coding)| {
                let panels = Panels { nr: 32, k_pack: 1, k: 256, groups: 1, group_cols: 96, ways: 1, coding };
                MatmulKey::new(8, &panels, dtype, Compute::F32)
            })
            .collect();
        let mut tuning = Tuning::default();
        let (_, tile) = sample();
        let tile_of = |i: usize| MatmulTile { n_block: 1 + i as u32, ..tile };
        keys.iter().enumerate().for_each(|(i, key)| tuning.set(key.clone(), tile_of(i)));
        let back = read(&tuning.text(&isa()).unwrap()).unwrap();
        for (i, key) in keys.iter().enumerate() {
            assert_eq!(back.matmul(key), Some(tile_of(i)), "{key:?}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let (key, tile) = sample();
        let mut tuning = Tuning::default();
        tuning.set(key, tile);
        let good = tuning.text(&isa()).unwrap();
        for (from, to, code, word) in [
            ("\"rcompile_tuning\": 8", "\"rcompile_tuning\": 7", 6, "rcompile_tuning"),
            ("\"features\": \"", "\"features\": \"+other,", 5, "features"),
            ("\"rows\": 7", "\"rows\": 65", 5, "tile.fetch.busy.rows"),
            ("\"rows\": 7", "\"rows\": 0", 5, "tile.fetch.busy.rows"),
            ("\"rows\": 7,", "", 4, "rows"),
            ("\"l1\": 3072", "\"l1\": 100", 5, "tile.fetch.busy.l1"),
            ("\"streams\": 3", "\"streams\": 65", 5, "tile.fetch.near.streams"),
            ("\"l2\": 2048", "\"l2\": 100", 5, "tile.fetch.near.ahead.l2"),
            ("\"l1\": 768", "\"l1\": 100", 5, "tile.fetch.near.ahead.l1"),
            ("x86-64-v4", "znver5", 5, "cpu"),
            ("x86_64-unknown-linux-gnu", "aarch64-unknown-linux-gnu", 5, "target"),
            ("\"mr\": 8", "\"mr\": 13", 5, "matmuls[0].tile.mr"),
            ("\"mr\": 8", "\"mr\": 0", 5, "matmuls[0].tile.mr"),
            ("\"mr\": 8", "\"mr\": -1", 4, "-1"),
            ("\"block_mr\": 6", "\"block_mr\": 9", 5, "matmuls[0].tile.block_mr"),
            ("\"mr\": 8", "\"rows\": 8", 4, "rows"),
            ("\"k_block\": 0", "\"k_block\": 33", 5, "k_block"),
            ("\"k_block\": 0", "\"k_block\": 66", 5, "k_block"),
            ("\"m_block\": 0", "\"m_block\": 16", 5, "m_block"),
            ("\"l2\": 4096", "\"l2\": 100", 5, "tile.fetch.ahead.l2"),
            ("\"l1\": 1024", "\"l1\": 100", 5, "tile.fetch.ahead.l1"),
            ("\"streams\": 6", "\"streams\": 0", 5, "tile.fetch.streams"),
            ("bf16", "int4", 4, "int4"),
            ("\"ways\": 2", "\"ways\": 2, \"depth\": 1", 4, "depth"),
            ("\"ways\": 2,", "", 4, "ways"),
            ("{", "", 4, "no tuning file"),
        ] {
            let text = good.replacen(from, to, 1);
            assert_ne!(text, good, "{from}");
            let e = read(&text).unwrap_err();
            assert_eq!(e.exit_code(), code, "{to}: {e}");
            assert!(e.to_string().contains(word) && e.lines()[0].starts_with("error["), "{to}: {e}");
        }
        // What there need not be is null, and said all the same.
        let (key, tile) = sample();
        tuning.set(key, MatmulTile { fetch: Fetch { busy: None, near: None, ..tile.fetch }, ..tile });
        let good_too = tuning.text(&isa()).unwrap();
        assert_eq!(read(&good_too).unwrap(), tuning);
        for field in ["busy", "near"] {
            let text = good_too.replacen(&format!(",\n          \"{field}\": null"), "", 1);
            assert_ne!(text, good_too);
            let e = read(&text).unwrap_err();
            assert!(e.exit_code() == 4 && e.to_string().contains(field), "{field}: {e}");
        }
        // Numbers that other limits follow from may be too large for those.
        let large = |name: &str, value: &str, block: &str| {
            let text = good.replacen(&format!("\"{name}\": {value}"), &format!("\"{name}\": 4294967295"), 1);
            let changed = text.replacen(&format!("\"{block}\": 0"), &format!("\"{block}\": 64"), 1);
            assert!(changed != text && text != good);
            read(&changed).unwrap_err()
        };
        for (name, value, block, word) in [("mr", "8", "m_block", "tile.mr"), ("k", "64", "k_block", "tile.k_block")] {
            let e = large(name, value, block);
            assert!(e.exit_code() == 5 && e.to_string().contains(word), "{name}: {e}");
        }
        assert_eq!(Tuning::read(Path::new("/nowhere"), &isa()).unwrap_err().exit_code(), 3);
        assert_eq!(Tuning::read(Path::new("/"), &isa()).unwrap_err().exit_code(), 3);
    }
}
