//! `rcompile cache [list|clean]`.

use super::store::{Kind, Listed, Store, open_entry, read_header};
use super::{NO_DIRECTORY, directory, limit};
use crate::error::Error;
use crate::options::{CacheAction, CacheOptions, CacheVerb};
use crate::report;
use rcompile_message::{escape, size};
use serde_json::json;
use std::fmt::Write;
use std::time::{SystemTime, UNIX_EPOCH};

/// The verb. A directory that does not exist is an empty cache.
pub fn run(verb: &CacheVerb) -> Result<(), Error> {
    let options = CacheOptions { cache_dir: verb.cache_dir.clone(), ..CacheOptions::default() };
    let Some(dir) = directory(&options) else {
        return Err(Error::Usage { what: NO_DIRECTORY.into(), help: None });
    };
    let store = Store::at(&dir);
    match verb.action {
        CacheAction::List => list(&store, verb.json),
        CacheAction::Clean => clean(&store, verb.json),
    }
}

fn list(store: &Store, as_json: bool) -> Result<(), Error> {
    let list = store.list(false).map_err(|e| Error::output(store.dir(), "reading", &e))?;
    let bytes: u64 = list.iter().map(|l| l.bytes).sum();
    let limit = limit()?;
    let described = list.iter().map(|l| (l, describe(l)));
    if as_json {
        let entries: Vec<_> = described
            .map(|(l, what)| {
                let used = l.used.duration_since(UNIX_EPOCH).map_or(0, |t| t.as_secs());
                let key = l.path.file_name().map(|n| n.to_string_lossy());
                json!({ "kind": l.kind.folder(), "key": key, "bytes": l.bytes, "used_unix_s": used, "what": what.0, "version": what.1 })
            })
            .collect();
        return report::print_json(
            &json!({ "dir": store.dir().display().to_string(), "bytes": bytes, "limit_bytes": limit, "entries": entries }),
        );
    }
    let mut out = String::new();
    for (l, (what, _)) in described {
        let kind = if l.kind == Kind::Object { "object" } else { "weights" };
        let _ = writeln!(out, "{kind:<8} {:>10} {:>10}  {}", size(l.bytes), ago(l.used), escape(&what));
    }
    let dir = escape(&store.dir().display().to_string());
    let _ = writeln!(out, "{dir}: {} entries, {} of at most {}", list.len(), size(bytes), size(limit));
    report::print(&out)
}

fn clean(store: &Store, as_json: bool) -> Result<(), Error> {
    let (files, bytes) = store.clean().map_err(|(path, e)| Error::output(&path, "removing", &e))?;
    if as_json {
        return report::print_json(&json!({ "dir": store.dir().display().to_string(), "removed": files, "bytes_freed": bytes }));
    }
    report::print(&format!("{}: {files} entries removed, {} freed\n", escape(&store.dir().display().to_string()), size(bytes)))
}

/// What an entry is, and the version that made it.
fn describe(listed: &Listed) -> (String, String) {
    let header = open_entry(&listed.path).ok().flatten().and_then(|f| read_header(&f));
    header.map_or_else(|| ("damaged".into(), String::new()), |h| (h.description.what, h.description.version))
}

fn ago(time: SystemTime) -> String {
    let s = SystemTime::now().duration_since(time).map_or(0, |t| t.as_secs());
    match s {
        0..120 => format!("{s} s ago"),
        120..7200 => format!("{} min ago", s / 60),
        7200..172_800 => format!("{} h ago", s / 3600),
        _ => format!("{} d ago", s / 86400),
    }
}
