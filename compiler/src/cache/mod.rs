//! The compile cache: objects of units and, with `--cache-weights`, packed weights, under the hash of everything that they depend on.
//!
//! ```text
//! object    unit key (kernel, buffers, weights' places, ISA, options), compiler fingerprint              -> object file
//! weights   weight table (recipes, layouts, places), names, sizes and times of the weight files, scheme of their codes, calibrated
//!           codes, --allow-nonfinite, this program
//!                                                                                                        -> weights area
//! ```
//! The key of an object holds all its inputs. Packed weights are found, and copied, by what is known of the files before they have been
//! read, which takes as long as the copy; that their content is what the entry was packed from, by sha256, is known before the executable
//! gets its name ([`Cache::weights_hold`]). So an entry never becomes wrong, and an executable has the same bytes with and without the
//! cache. What is new is kept in memory until the build has succeeded ([`Cache::commit`]): a build that fails adds nothing. A
//! damaged entry is removed and made anew; a directory that cannot be used is a warning. Units of which texts are wanted (`--emit
//! llvm-ir,asm`) are always compiled.

pub mod entry;
mod fingerprint;
pub mod store;
pub mod verb;

use crate::error::{Error, warning};
use crate::options::CacheOptions;
use crate::pack::{Packed, Sink};
use crate::plan::WeightTable;
use crate::report::CacheReport;
use entry::{Description, Header, Key};
use rcompile_codegen::{Compiled, Unit, compile};
use rcompile_message::{escape, size};
use rcompile_models::dir::InputFile;
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, PoisonError};
use store::{Found, Kind, Store};

/// Bytes of a cache where `RCOMPILE_CACHE_SIZE` does not say.
const DEFAULT_LIMIT: u64 = 10 << 30;
/// The variable that sets the limit.
const LIMIT_VARIABLE: &str = "RCOMPILE_CACHE_SIZE";

/// The cache as one build sees it.
#[derive(Debug)]
pub struct Cache {
    store: Option<Store>,
    limit: u64,
    with_weights: bool,
    hits: AtomicU64,
    misses: AtomicU64,
    compiled: AtomicU64,
    damaged: Mutex<Vec<Kind>>,
    /// What this build has compiled, with the units' symbols: autotuning and calibration want the same again.
    new_objects: Mutex<BTreeMap<Key, (String, Vec<u8>)>>,
    new_weights: Option<NewWeights>,
    weights_hit: Option<bool>,
}

/// Packed weights to be kept: they lie in the finished executable.
#[derive(Debug)]
struct NewWeights {
    header: Header,
    file: File,
    base: u64,
}

/// Why there is no place for a cache.
const NO_DIRECTORY: &str = "no cache directory, expected --cache-dir D or an absolute path in XDG_CACHE_HOME or HOME, found none";

/// Weights that were copied from the cache.
#[derive(Clone, Debug)]
pub struct WeightsHit {
    /// What packing gave.
    pub packed: Packed,
    /// See [`Description::source`].
    source: String,
}

impl Cache {
    /// A cache without a directory: it knows what this build has compiled.
    pub fn none() -> Cache {
        Cache {
            store: None,
            limit: 0,
            with_weights: false,
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            compiled: AtomicU64::new(0),
            damaged: Mutex::default(),
            new_objects: Mutex::default(),
            new_weights: None,
            weights_hit: None,
        }
    }

    /// The cache of these options, and a warning where its directory cannot be used. Errors: `RCOMPILE_CACHE_SIZE` (2).
    pub fn open(options: &CacheOptions) -> Result<(Cache, Option<String>), Error> {
        let mut cache = Cache { with_weights: options.cache_weights, ..Cache::none() };
        let Some(dir) = directory(options) else {
            let warning = || warning("cache", "nothing is kept for later builds", NO_DIRECTORY);
            return Ok((cache, (!options.no_cache || options.cache_weights).then(warning)));
        };
        cache.limit = limit()?;
        match Store::open(&dir) {
            Ok(store) => cache.store = Some(store),
            Err(e) => return Ok((cache, Some(of_directory(&dir, &format!("cannot be used, the build goes on without a cache: {e}"))))),
        }
        Ok((cache, None))
    }

    /// The object of a unit: of this build, else from the cache, else from LLVM.
    pub fn compile(&self, unit: &Unit<'_>) -> Result<Compiled, rcompile_codegen::Error> {
        let key = key(fingerprint::objects(), &[unit.key.as_bytes()]);
        if !unit.has_texts()
            && let Some(object) = self.known(&key)
        {
            return Ok(Compiled { object, llvm_ir: None, asm: None });
        }
        self.compiled.fetch_add(1, Ordering::Relaxed);
        let compiled = compile(unit)?;
        if !unit.has_texts() {
            lock(&self.new_objects).insert(key, (unit.symbol.clone(), compiled.object.clone()));
        }
        Ok(compiled)
    }

    fn known(&self, key: &Key) -> Option<Vec<u8>> {
        if let Some((_, object)) = lock(&self.new_objects).get(key) {
            return Some(object.clone());
        }
        self.seen(Kind::Object, self.store.as_ref()?.get(Kind::Object, key))
    }

    /// Are packed weights looked up and kept?
    pub fn has_weights(&self) -> bool {
        self.with_weights && self.store.is_some()
    }

    /// The key of a weights area: what is packed, from which files, whether NaN is accepted, where given codes come from.
    pub fn weights_key(&self, table: &WeightTable, files: &[rcompile_models::dir::File], allow_nonfinite: bool, given: &str) -> Key {
        let files: String = files.iter().map(|f| format!("{} {} {:?}\n", f.name(), f.size(), f.modified())).collect();
        let what = format!("{allow_nonfinite} {table:?}");
        key(&fingerprint::weights(), &[files.as_bytes(), what.as_bytes(), given.as_bytes()])
    }

    /// Copies packed weights of `len` bytes into place; whether they are right is still to be seen.
    pub fn load_weights(&mut self, key: &Key, len: u64, sink: Sink<'_>, progress: &(dyn Fn(u64) + Sync)) -> Option<WeightsHit> {
        let store = self.store.as_ref()?;
        let found = self.seen(Kind::Weights, store.copy_to(Kind::Weights, key, len, sink, progress));
        self.weights_hit = Some(found.is_some());
        let Header { hash, description, .. } = found?;
        Some(WeightsHit { packed: Packed { hash, nonfinite: description.nonfinite }, source: description.source })
    }

    /// Were the loaded weights packed from files of this content?
    pub fn weights_hold(&self, loaded: &WeightsHit, files: &[InputFile]) -> bool {
        loaded.source == source(files)
    }

    /// Removes loaded weights that turned out to be damaged, or another checkpoint's.
    pub fn discard_weights(&mut self, key: &Key, damaged: bool) {
        if let Some(store) = &self.store {
            store.remove(Kind::Weights, key);
        }
        if damaged {
            lock(&self.damaged).push(Kind::Weights);
        }
        self.weights_hit = Some(false);
        self.hits.fetch_sub(1, Ordering::Relaxed);
        self.misses.fetch_add(1, Ordering::Relaxed);
    }

    /// Remembers weights that were packed into `sink` from these files for [`Cache::commit`].
    pub fn keep_weights(&mut self, key: Key, len: u64, packed: &Packed, sink: Sink<'_>, files: &[InputFile], model: &str) {
        // A descriptor of its own: the file gets another name before its bytes are copied.
        let Ok(file) = File::open(sink.path) else { return };
        let description = Description { nonfinite: packed.nonfinite.clone(), source: source(files), ..describe(model) };
        self.new_weights = Some(NewWeights { header: Header { key, len, hash: packed.hash, description }, file, base: sink.base });
    }

    /// Counts what was found.
    fn seen<T>(&self, kind: Kind, found: Found<T>) -> Option<T> {
        if let Found::Damaged = found {
            lock(&self.damaged).push(kind);
        }
        let count = if let Found::Hit(_) = found { &self.hits } else { &self.misses };
        count.fetch_add(1, Ordering::Relaxed);
        match found {
            Found::Hit(content) => Some(content),
            _ => None,
        }
    }

    /// One line about damaged entries since the last call.
    pub fn warning(&self) -> Option<String> {
        let damaged = std::mem::take(&mut *lock(&self.damaged));
        let dir = self.store.as_ref()?.dir();
        (!damaged.is_empty()).then(|| of_directory(dir, &format!("{} damaged entries were made anew", damaged.len())))
    }

    /// The build has succeeded: writes what is new, and removes what has not been used for longest. A warning where some of that fails,
    /// which keeps nothing from the rest, or where weights would not stay.
    pub fn commit(&mut self) -> Option<String> {
        let store = self.store.as_ref()?;
        let objects = std::mem::take(&mut *lock(&self.new_objects));
        let weights = self.new_weights.take();
        if objects.is_empty() && weights.is_none() {
            return None;
        }
        let of_objects = objects.iter().map(|(key, (symbol, object))| store.put(Kind::Object, key, describe(symbol), object));
        let mut results: Vec<std::io::Result<()>> = of_objects.collect();
        let mut too_large = None;
        if let Some(w) = &weights {
            // All else would go for it, and it for the next build's objects.
            if w.header.len > store::kept(self.limit) {
                let (bytes, room) = (size(w.header.len), size(store::kept(self.limit)));
                too_large = Some(format!("has room for weights of {room}, and these are {bytes}: {LIMIT_VARIABLE} sets it"));
            } else {
                results.push(store.put_from(Kind::Weights, &w.header, &w.file, w.base));
            }
        }
        results.push(store.evict(self.limit).map(drop));
        let failed = results.into_iter().find_map(Result::err).map(|e| format!("cannot be written: {e}"));
        failed.or(too_large).map(|what| of_directory(store.dir(), &what))
    }

    /// For the report.
    pub fn report(&self) -> CacheReport {
        let count = |c: &AtomicU64| c.load(Ordering::Relaxed);
        CacheReport {
            dir: self.store.as_ref().map(|s| s.dir().display().to_string()),
            hits: count(&self.hits),
            misses: count(&self.misses),
            llvm_compilations: count(&self.compiled),
            weights: match (self.has_weights(), self.weights_hit) {
                (true, Some(true)) => "hit",
                (true, _) => "miss",
                (false, _) => "off",
            }
            .into(),
        }
    }
}

/// Where the cache of these options is; None: there is none.
pub fn directory(options: &CacheOptions) -> Option<PathBuf> {
    if options.no_cache {
        return None;
    }
    options.cache_dir.clone().or_else(default_directory)
}

/// `$XDG_CACHE_HOME/rcompile`, else `$HOME/.cache/rcompile`.
fn default_directory() -> Option<PathBuf> {
    let absolute = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|p| p.is_absolute());
    let base = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(".cache")));
    base.map(|base| base.join("rcompile"))
}

/// Refuses a limit that is none, where there is a cache (2).
pub fn check(options: &CacheOptions) -> Result<(), Error> {
    directory(options).map_or(Ok(()), |_| limit().map(drop))
}

/// Most bytes of the cache.
pub fn limit() -> Result<u64, Error> {
    let Some(text) = std::env::var_os(LIMIT_VARIABLE).filter(|text| !text.is_empty()) else { return Ok(DEFAULT_LIMIT) };
    let text = text.to_string_lossy();
    parse_size(&text).ok_or_else(|| Error::Usage {
        what: format!("{LIMIT_VARIABLE}: expected a number of bytes, or one with K, M, G or T, found '{}'", escape(&text)),
        help: Some(format!("{LIMIT_VARIABLE}=10G")),
    })
}

/// `500M`, `10G`, `123`; binary units.
fn parse_size(text: &str) -> Option<u64> {
    let text = text.trim();
    let unit = text.strip_suffix(['B', 'b']).unwrap_or(text);
    let (digits, shift) = match unit.strip_suffix(['I', 'i']).filter(|t| t.ends_with(char::is_alphabetic)).unwrap_or(unit) {
        t if t.ends_with(['K', 'k']) => (&t[..t.len() - 1], 10),
        t if t.ends_with(['M', 'm']) => (&t[..t.len() - 1], 20),
        t if t.ends_with(['G', 'g']) => (&t[..t.len() - 1], 30),
        t if t.ends_with(['T', 't']) => (&t[..t.len() - 1], 40),
        t => (t, 0),
    };
    digits.trim().parse::<u64>().ok()?.checked_mul(1 << shift)
}

/// What [`Description::source`] says of files of weights.
fn source(files: &[InputFile]) -> String {
    let text: String = files.iter().map(|i| format!("{} {}\n", i.name, i.sha256)).collect();
    blake3::hash(text.as_bytes()).to_hex().to_string()
}

/// BLAKE3 of a fingerprint and parts, each with its length.
fn key(fingerprint: &str, parts: &[&[u8]]) -> Key {
    let mut hasher = blake3::Hasher::new();
    for part in [fingerprint.as_bytes()].iter().chain(parts) {
        hasher.update(&(part.len() as u64).to_le_bytes()).update(part);
    }
    Key(*hasher.finalize().as_bytes())
}

fn describe(what: &str) -> Description {
    Description { what: what.chars().take(200).collect(), version: env!("CARGO_PKG_VERSION").into(), ..Description::default() }
}

fn of_directory(dir: &Path, what: &str) -> String {
    warning("cache", &dir.display().to_string(), what)
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests;
