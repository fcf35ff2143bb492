use super::*;
use std::os::unix::fs::FileExt;
use std::time::{Duration, SystemTime};

fn put(store: &Store, n: u8, bytes: usize, age_s: u64) -> Key {
    let key = Key([n; 32]);
    store.put(Kind::Object, &key, describe("unit"), &vec![n; bytes]).unwrap();
    let listed = store.list(false).unwrap().into_iter().find(|l| l.path.ends_with(key.name())).unwrap();
    File::open(listed.path).unwrap().set_modified(SystemTime::now() - Duration::from_secs(age_s)).unwrap();
    key
}

fn has(store: &Store, key: &Key) -> bool {
    matches!(store.get(Kind::Object, key), Found::Hit(_))
}

#[test]
fn sizes() {
    let cases = [
        ("0", 0),
        ("123", 123),
        ("2K", 2048),
        ("500M", 500 << 20),
        ("10G", 10 << 30),
        (" 1 GB ", 1 << 30),
        ("1t", 1 << 40),
        ("3GiB", 3 << 30),
    ];
    for (text, bytes) in cases {
        assert_eq!(parse_size(text), Some(bytes), "{text}");
    }
    for bad in ["", "G", "-1", "1.5G", "1GBB", "1iB", "i", "1GI2", "10 apples", "99999999999T"] {
        assert_eq!(parse_size(bad), None, "{bad}");
    }
}

/// What autotuning has compiled is not compiled again, also without a directory.
#[test]
fn objects_of_this_build_are_known() {
    let dir = tempfile::tempdir().unwrap();
    for store in [None, Some(Store::open(dir.path()).unwrap())] {
        let mut cache = Cache { store, limit: DEFAULT_LIMIT, ..Cache::none() };
        let [first, second] = [key("f", &[b"a"]), key("f", &[b"b"])];
        lock(&cache.new_objects).insert(first, ("unit".into(), vec![1, 2, 3]));
        assert_eq!((cache.known(&first), cache.known(&second)), (Some(vec![1, 2, 3]), None));
        assert_eq!(cache.commit(), None);
        // Here in the directory, there still in memory.
        assert_eq!(cache.known(&first), Some(vec![1, 2, 3]));
    }
}

#[test]
fn keys_depend_on_every_part() {
    let base = key("f", &[b"ab", b"c"]);
    for other in [key("g", &[b"ab", b"c"]), key("f", &[b"a", b"bc"]), key("f", &[b"abc"]), key("f", &[b"ab", b"c", b""])] {
        assert_ne!(base, other);
    }
    assert_eq!(base, key("f", &[b"ab", b"c"]));
}

#[test]
fn least_recently_used_go_first() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("cache")).unwrap();
    let [a, b, c] = [put(&store, 1, 1000, 300), put(&store, 2, 1000, 200), put(&store, 3, 1000, 100)];
    let each = entry::PAYLOAD_AT + 1000;
    assert_eq!(store.evict(3 * each).unwrap(), 0);
    // Using the oldest makes the next one the oldest.
    assert!(has(&store, &a));
    assert_eq!(store.evict(3 * each - 1).unwrap(), each);
    assert!(has(&store, &a) && !has(&store, &b) && has(&store, &c));
    assert_eq!(store.evict(0).unwrap(), 2 * each);
    assert!(store.list(true).unwrap().is_empty());
}

#[test]
fn an_entry_stays_when_its_copy_cannot_be_written() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("cache")).unwrap();
    let key = put(&store, 1, 1000, 0);
    let path = dir.path().join("out");
    std::fs::write(&path, b"").unwrap();
    let copied = |file: &File| store.copy_to(Kind::Object, &key, 1000, Sink { file, path: &path, base: 0 }, &|_| {});
    assert!(matches!(copied(&File::open(&path).unwrap()), Found::Miss));
    assert!(matches!(copied(&File::create(&path).unwrap()), Found::Hit(_)));
}

/// Weights are copied piece by piece, to and from any place in a file.
#[test]
fn weights_of_several_pieces() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("cache")).unwrap();
    let file = |name: &str| File::options().read(true).write(true).create(true).truncate(true).open(dir.path().join(name)).unwrap();
    let (from, to, len) = (file("from"), file("to"), 2 * store::PIECE + 5);
    // Elsewhere a hole.
    let marks = [0, store::PIECE - 3, store::PIECE, 2 * store::PIECE, len - 1];
    from.set_len(100 + len).unwrap();
    marks.iter().zip(1..).for_each(|(at, mark)| from.write_all_at(&[mark], 100 + at).unwrap());
    let header = Header { key: Key([1; 32]), len, hash: [0; 32], description: describe("model") };
    store.put_from(Kind::Weights, &header, &from, 100).unwrap();
    let copied = std::sync::atomic::AtomicU64::new(0);
    let progress = |bytes| _ = copied.fetch_add(bytes, Ordering::Relaxed);
    let sink = Sink { file: &to, path: dir.path(), base: 50 };
    assert!(matches!(store.copy_to(Kind::Weights, &header.key, len, sink, &progress), Found::Hit(_)));
    assert_eq!((to.metadata().unwrap().len(), copied.into_inner()), (50 + len, len));
    let mut found = vec![0; len as usize];
    to.read_exact_at(&mut found, 50).unwrap();
    let found: Vec<(u64, u8)> = (0..).zip(found).filter(|(_, byte)| *byte != 0).collect();
    assert_eq!(found, marks.into_iter().zip(1..).collect::<Vec<_>>());
}

#[test]
fn what_killed_builds_left_is_removed() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let left = |name: &str, age: u64| {
        let path = dir.path().join("objects").join(name);
        std::fs::write(&path, b"half").unwrap();
        File::open(&path).unwrap().set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
        path
    };
    let (old, young) = (left(".new-old", 7200), left(".new-young", 10));
    assert!(store.list(false).unwrap().is_empty());
    assert_eq!(store.evict(u64::MAX).unwrap(), 4);
    assert!(!old.exists() && young.exists());
}

#[test]
fn clean_removes_only_what_is_ours() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    put(&store, 1, 10, 0);
    let of_entries = |folder: &str| format!("objects/{folder}/{}", "a".repeat(64));
    let (folder, name) = (of_entries("notes"), format!("objects/01/{}", "z".repeat(64)));
    std::fs::create_dir(dir.path().join("objects/notes")).unwrap();
    for mine in ["notes", "objects/ab", "objects/01/notes", &folder, &name] {
        std::fs::write(dir.path().join(mine), b"keep").unwrap();
    }
    assert_eq!(store.clean().unwrap(), (1, entry::PAYLOAD_AT + 10));
    for mine in ["notes", "objects/ab", "objects/01/notes", &folder, &name] {
        assert!(dir.path().join(mine).is_file(), "{mine}");
    }
    assert_eq!(Store::at(&dir.path().join("nowhere")).clean().unwrap(), (0, 0));
}

#[test]
fn damaged_entries_are_removed() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(dir.path()).unwrap();
    let path_of = |key: &Key| store.list(false).unwrap().into_iter().find(|l| l.path.ends_with(key.name())).map(|l| l.path);
    type Change = fn(&mut Vec<u8>);
    let damage: [Change; 5] =
        [|b| b[20] ^= 1, |b| *b.last_mut().unwrap() ^= 1, |b| b.truncate(b.len() - 1), |b| b.truncate(100), |b| b.push(0)];
    for (n, change) in damage.iter().enumerate() {
        let key = put(&store, n as u8, 1000, 0);
        let path = path_of(&key).unwrap();
        let mut bytes = std::fs::read(&path).unwrap();
        change(&mut bytes);
        std::fs::write(&path, bytes).unwrap();
        assert!(matches!(store.get(Kind::Object, &key), Found::Damaged), "case {n}");
        assert!(matches!(store.get(Kind::Object, &key), Found::Miss), "case {n}");
    }
    // An entry under another's name.
    let (a, b) = (put(&store, 10, 1000, 0), put(&store, 11, 1000, 0));
    std::fs::copy(path_of(&a).unwrap(), path_of(&b).unwrap()).unwrap();
    assert!(has(&store, &a));
    assert!(matches!(store.get(Kind::Object, &b), Found::Damaged));
    // A length that no file has: headers have no key either.
    let key = put(&store, 12, 1000, 0);
    let header = Header { key, len: u64::MAX - 7, hash: [0; 32], description: describe("unit") };
    std::fs::write(path_of(&key).unwrap(), header.encode().unwrap()).unwrap();
    assert!(matches!(store.get(Kind::Object, &key), Found::Damaged));
}

#[test]
fn weights_with_and_without_nan_are_two_entries() {
    let (cache, table) = (Cache::none(), WeightTable::default());
    assert_ne!(cache.weights_key(&table, &[], true, ""), cache.weights_key(&table, &[], false, ""));
}

/// A cache of 64 KB with a unit of an earlier build, and weights of `len` bytes to be kept.
fn with_weights(dir: &Path, len: u64) -> (Cache, Key) {
    let store = Store::open(&dir.join("cache")).unwrap();
    let old = put(&store, 1, 100, 300);
    let path = dir.join("exe");
    std::fs::write(&path, vec![7; len as usize]).unwrap();
    let header = Header { key: Key([9; 32]), len, hash: [0; 32], description: describe("model") };
    let new_weights = Some(NewWeights { header, file: File::open(path).unwrap(), base: 0 });
    (Cache { store: Some(store), limit: 64 << 10, new_weights, ..Cache::none() }, old)
}

#[test]
fn weights_that_cannot_stay_are_not_kept() {
    let dir = tempfile::tempdir().unwrap();
    let (mut cache, old) = with_weights(dir.path(), 60 << 10);
    let warning = cache.commit().unwrap();
    let expected = "has room for weights of 59.0 kB, and these are 61.4 kB: RCOMPILE_CACHE_SIZE";
    assert!(warning.contains(expected), "{warning}");
    let store = cache.store.unwrap();
    assert!(has(&store, &old));
    assert_eq!(store.list(true).unwrap().len(), 1);
    let (mut cache, old) = with_weights(dir.path(), 20 << 10);
    assert_eq!(cache.commit(), None);
    let store = cache.store.unwrap();
    assert!(has(&store, &old));
    assert_eq!(store.list(true).unwrap().len(), 2);
}

/// One entry that cannot be written keeps neither the others out nor the cache above its limit.
#[test]
fn a_failed_entry_is_the_only_one() {
    let dir = tempfile::tempdir().unwrap();
    let (mut cache, old) = with_weights(dir.path(), 20 << 10);
    let store = cache.store.clone().unwrap();
    let killed = store.dir().join("objects/.new-killed");
    std::fs::write(&killed, [0; 100]).unwrap();
    File::open(&killed).unwrap().set_modified(SystemTime::now() - Duration::from_secs(9000)).unwrap();
    // A file is where the folder of its entry should be.
    std::fs::write(store.dir().join("objects/02"), "").unwrap();
    for n in [2, 3] {
        lock(&cache.new_objects).insert(Key([n; 32]), ("unit".into(), vec![n; 10]));
    }
    let warning = cache.commit().unwrap();
    assert!(warning.contains("cannot be written"), "{warning}");
    assert!(has(&store, &old) && !has(&store, &Key([2; 32])) && has(&store, &Key([3; 32])));
    assert!(store.list(true).unwrap().iter().any(|l| l.kind == Kind::Weights) && !killed.exists());
}
