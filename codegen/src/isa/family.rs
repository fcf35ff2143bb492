//! What all architectures have: CPUs by name, each with a set of features, which edits change.
//!
//! In: an architecture's [`Family`], the name of a CPU and edits. Out: the name and the features, or why there are none.

use super::Arch;
use crate::error::Error;
use crate::llvm::object;
use std::collections::BTreeSet;

/// Lists of features, by LLVM's names.
pub(super) type Features = &'static [&'static [&'static str]];

/// A CPU that can be named.
pub(super) struct Cpu {
    /// As `--cpu` takes it, and LLVM.
    pub name: &'static str,
    /// What it has on top of [`Family::base`].
    pub features: Features,
}

/// A CPU, in few letters for tables.
pub(super) const fn cpu(name: &'static str, features: Features) -> Cpu {
    Cpu { name, features }
}

/// The CPUs of an architecture.
pub(super) struct Family {
    /// Its architecture.
    pub arch: Arch,
    /// The lowest supported level.
    pub lowest: &'static str,
    /// What all named CPUs have.
    pub base: &'static [&'static str],
    /// Those of `base` without which no kernel works.
    pub needed: &'static [&'static str],
    /// Features that code may come to use; of a host's features only these count.
    pub known: Features,
    /// The named CPUs. (A function: tables may say more about each.)
    pub cpus: fn() -> Vec<&'static Cpu>,
}

impl Family {
    /// Names of its CPUs.
    pub fn names(&self) -> Vec<&'static str> {
        (self.cpus)().iter().map(|cpu| cpu.name).collect()
    }

    /// Name and features of `cpu`, after edits; of a known CPU, or the host's where it is `native`.
    pub fn resolve(&self, triple: &str, cpu: &str, edits: &[String]) -> Result<(String, BTreeSet<String>), Error> {
        let names = || self.names().join(", ");
        let (name, mut features): (String, BTreeSet<String>) = if cpu == "native" {
            let Some(host) = object::host_name(self.arch) else {
                let what = format!("CPU 'native' is this machine's, which is none of {triple}; name one of: {}", names());
                return Err(Error::Target(what));
            };
            // As executables ask before they start. (Of an Arm CPU LLVM lists neither dot products nor matrix instructions.)
            let known = self.known.iter().flat_map(|list| list.iter()).filter(|f| rcompile_runtime::cpu::has(f));
            (host, known.map(|f| f.to_string()).collect())
        } else {
            let Some(row) = (self.cpus)().into_iter().find(|row| row.name == cpu) else {
                let native = object::host_name(self.arch).map_or("", |_| "native, ");
                return Err(Error::Target(format!("CPU '{cpu}' is not known for {triple}; known: {native}{}", names())));
            };
            let all = self.base.iter().chain(row.features.iter().flat_map(|list| list.iter()));
            (row.name.to_string(), all.map(|f| f.to_string()).collect())
        };
        edit(&mut features, edits, self.known)?;
        match self.needed.iter().find(|needed| !features.contains(**needed)) {
            Some(needed) => Err(Error::Target(format!("CPU '{name}' lacks {needed}; {} is the lowest supported level", self.lowest))),
            None => Ok((name, features)),
        }
    }
}

/// Applies `+name` and `-name`.
fn edit(features: &mut BTreeSet<String>, edits: &[String], known: Features) -> Result<(), Error> {
    for edit in edits {
        let is_known = |f: &str| known.iter().any(|l| l.contains(&f));
        match (edit.strip_prefix('+'), edit.strip_prefix('-')) {
            (Some(f), _) if is_known(f) => {
                features.insert(f.to_string());
            }
            (_, Some(f)) if is_known(f) => {
                features.remove(f);
            }
            _ => {
                return Err(Error::Target(format!(
                    "feature edit '{edit}' is not known; write +NAME or -NAME with one of: {}",
                    known.concat().join(", ")
                )));
            }
        }
    }
    Ok(())
}
