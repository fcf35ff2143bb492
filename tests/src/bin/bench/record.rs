//! Everything that was measured: rounds of values by key, kept in one JSON file so that a long benchmark can be made in pieces.
//!
//! ```text
//! {"facts": {"engine OpenVINO": ".."}, "commands": [..], "problems": [..],
//!  "rounds": [{"topic": "decode", "date": "..", "commit": "..", "values": {"limit read file 2": [32.5], "bf16 decode | rcompile": [12.1]}}]}
//! ```
//! What is compared is compared within a round, which is one turn of the engines where a topic has rates: quotients are taken round by
//! round, over the rounds that have both values.

use std::collections::BTreeMap;
use std::error::Error;
use std::fs;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::stats::Samples;

#[derive(Default, Serialize, Deserialize)]
pub struct Record {
    /// What is no number: versions of engines, names of instructions.
    pub facts: BTreeMap<String, String>,
    /// Every command in the order of its first use.
    pub commands: Vec<String>,
    /// What went wrong on the way.
    pub problems: Vec<String>,
    pub rounds: Vec<Round>,
}

/// One round of one topic, or one turn of one of its works.
#[derive(Serialize, Deserialize)]
pub struct Round {
    pub topic: String,
    pub date: String,
    pub commit: String,
    values: BTreeMap<String, Vec<f64>>,
}

impl Round {
    /// The median of a key's values; None without any.
    pub fn median(&self, key: &str) -> Option<f64> {
        let values = self.values.get(key)?;
        Some(values.iter().copied().collect::<Samples>().median())
    }
}

impl Record {
    pub fn load(path: &Path) -> Result<Self, Box<dyn Error>> {
        let text = fs::read_to_string(path).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(serde_json::from_str(&text).map_err(|e| format!("{}: {e}", path.display()))?)
    }

    pub fn save(&self, path: &Path) -> Result<(), Box<dyn Error>> {
        fs::write(path, serde_json::to_string_pretty(self)?).map_err(|e| format!("{}: {e}", path.display()))?;
        Ok(())
    }

    /// Values that follow belong to a new round.
    pub fn begin(&mut self, topic: &str, date: String, commit: String) {
        self.rounds.push(Round { topic: topic.into(), date, commit, values: BTreeMap::new() });
    }

    /// Adds a value to the round; what could not be measured (NaN) is not a value.
    pub fn push(&mut self, key: impl Into<String>, value: f64) {
        let round = self.rounds.last_mut().expect("a round has begun");
        if value.is_finite() {
            round.values.entry(key.into()).or_default().push(value);
        }
    }

    pub fn has(&self, key: &str) -> bool {
        self.rounds.iter().any(|r| r.values.contains_key(key))
    }

    /// Every value of a key.
    pub fn get(&self, key: &str) -> Samples {
        self.rounds.iter().filter_map(|r| r.values.get(key)).flatten().copied().collect()
    }

    /// `f` of each round; a round without a value is left out.
    pub fn per_round(&self, f: impl Fn(&Round) -> Option<f64>) -> Samples {
        self.rounds.iter().filter_map(f).collect()
    }

    /// `f` of the medians of `keys` in each round that has them all.
    pub fn each<const N: usize>(&self, keys: [&str; N], f: impl Fn([f64; N]) -> f64) -> Samples {
        self.per_round(|round| {
            let mut values = [0.0; N];
            for (value, key) in values.iter_mut().zip(keys) {
                *value = round.median(key)?;
            }
            Some(f(values))
        })
    }

    /// `a / b`, round by round.
    pub fn ratio(&self, a: &str, b: &str) -> Samples {
        self.each([a, b], |[a, b]| a / b)
    }

    /// `100 * a / b`, round by round.
    pub fn percent(&self, a: &str, b: &str) -> Samples {
        self.each([a, b], |[a, b]| 100.0 * a / b)
    }

    /// Keys that begin so.
    pub fn keys<'r>(&'r self, prefix: &'r str) -> impl Iterator<Item = &'r str> {
        let mut keys: Vec<&str> =
            self.rounds.iter().flat_map(|r| r.values.keys()).map(String::as_str).filter(|k| k.starts_with(prefix)).collect();
        keys.sort_unstable();
        keys.dedup();
        keys.into_iter()
    }

    /// Rounds of a topic: their number, the first and the last date, the commits.
    pub fn history(&self) -> BTreeMap<&str, (usize, &str, &str, Vec<&str>)> {
        let mut topics: BTreeMap<&str, (usize, &str, &str, Vec<&str>)> = BTreeMap::new();
        for round in &self.rounds {
            let entry = topics.entry(&round.topic).or_insert((0, &round.date, &round.date, Vec::new()));
            entry.0 += 1;
            entry.2 = &round.date;
            if !entry.3.contains(&round.commit.as_str()) {
                entry.3.push(&round.commit);
            }
        }
        topics
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Record {
        let mut record = Record::default();
        for (ours, theirs) in [(10.0, 8.0), (12.0, f64::NAN), (9.0, 10.0)] {
            record.begin("decode", "today".into(), "c0ffee".into());
            record.push("ours", ours);
            record.push("theirs", theirs);
        }
        record
    }

    #[test]
    fn quotients_need_both_values_of_a_round() {
        let record = record();
        assert_eq!(record.get("ours").values(), [10.0, 12.0, 9.0]);
        assert_eq!(record.ratio("ours", "theirs").values(), [1.25, 0.9]);
        assert!(record.ratio("ours", "nobody").is_empty());
    }

    #[test]
    fn what_is_saved_is_loaded() {
        let path = std::env::temp_dir().join(format!("rcompile-bench-record-{}.json", std::process::id()));
        record().save(&path).unwrap();
        let loaded = Record::load(&path).unwrap();
        fs::remove_file(&path).unwrap();
        assert_eq!(loaded.percent("theirs", "ours").values(), record().percent("theirs", "ours").values());
        assert_eq!(loaded.history()["decode"], (3, "today", "today", vec!["c0ffee"]));
    }
}
