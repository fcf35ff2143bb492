//! What `profile`, `bench` and `inspect --scaling` say about a real executable: every region is there, times add up, rates follow from the
//! cost model.

use rcompile::options::{self, Parsed};
use rcompile_tests::{Exe, build, exe};
use serde_json::Value;
use std::path::Path;
use std::process::Command;

/// The bundled model: four layers, 3.5 MB of bf16 weights.
fn demo() -> Exe {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/model");
    build(&model, "--buckets 1,8,64")
}

fn list(value: &Value) -> &Vec<Value> {
    value.as_array().unwrap_or_else(|| panic!("no list: {value}"))
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or_else(|| panic!("no number: {value}"))
}

/// Names of a bucket's regions, as the manifest has them.
fn region_names(exe: &Exe, bucket: u64) -> Vec<String> {
    let info = exe.json(["info"]);
    let bucket = list(&info["entries"][0]["buckets"]).iter().find(|b| b["rows"] == bucket).expect("bucket");
    list(&bucket["regions"]).iter().map(|r| r["name"].as_str().expect("name").to_string()).collect()
}

#[test]
fn a_profile_accounts_for_all_of_the_time() {
    let exe = demo();
    let dir = tempfile::tempdir().expect("temporary directory");
    let trace = dir.path().join("trace.json");
    let report = exe.json(["profile", "-p", "100", "-n", "20", "-t", "2", "--trace", &trace.to_string_lossy()]);
    assert_eq!(report["threads"], 2);
    for limit in ["read_gb_per_s", "f32_gflop_per_s"] {
        assert!(number(&report["limits"][limit]) > 0.1, "{limit}: {}", report["limits"]);
    }
    let phases = list(&report["phases"]);
    assert_eq!(phases.iter().map(|p| p["phase"].as_str().unwrap()).collect::<Vec<_>>(), ["prefill", "decode"]);
    // 100 rows in buckets of 64 are two steps; each token of the answer is one.
    assert_eq!(phases.iter().map(|p| p["steps"].as_u64().unwrap()).collect::<Vec<_>>(), [2, 20]);
    for phase in phases {
        let ops = list(&phase["ops"]);
        let sum: f64 = ops.iter().map(|o| number(&o["ms"])).sum();
        assert!((sum / number(&phase["ms"]) - 1.0).abs() < 1e-6, "{phase}");
        let between = ops.iter().find(|o| o["op"] == "(between steps)").expect("between steps");
        assert!(number(&between["share"]).abs() < 0.05, "time that no step accounts for: {between}");
        for op in ops.iter().filter(|o| o["kind"] == "matmul") {
            let share = number(&op["of_limit"]);
            // Bounds are limits of the same minutes: a little more than all is a disturbed limit, much more a wrong account.
            assert!(share > 0.0 && share < 2.0, "{op}");
        }
        let wide = if phase["phase"] == "prefill" { 64 } else { 1 };
        for name in region_names(&exe, wide) {
            assert!(ops.iter().any(|o| o["op"] == name.as_str()), "{name} is missing");
        }
    }
    // One step of the prompt wants logits, and each token's: no other reads the head.
    let head = |phase: &Value| number(&list(&phase["ops"]).iter().find(|o| o["op"] == "lm_head").expect("head")["weight_bytes"]);
    // (The norm before it is another operation in one of the programs.)
    let heads = head(&phases[1]) / head(&phases[0]);
    assert!((heads - 20.0).abs() < 0.1, "{heads}");
    let text = exe.text(["profile", "-p", "100", "-n", "20"]);
    assert!(text.contains("| layers.attention |") && text.contains("prefill: 100 tokens in 2 steps"), "{text}");

    let trace: Value = serde_json::from_slice(&std::fs::read(&trace).expect("trace")).expect("JSON");
    check_trace(&trace, &region_names(&exe, 64));
}

#[test]
fn sequences_side_by_side_share_the_steps_of_decode() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/model");
    let exe = build(&model, "--buckets 1,8,64 --parallel 3");
    let phases = |batch: &str| list(&exe.json(["profile", "-p", "50", "-n", "5", "-b", batch])["phases"]).clone();
    let (one, three) = (phases("1"), phases("3"));
    for (phase, (tokens, steps)) in three.iter().zip([(150, 3), (15, 5)]) {
        assert_eq!((&phase["tokens"], &phase["steps"]), (&tokens.into(), &steps.into()), "{phase}");
    }
    // Weights are read once per step, the KV cache once per sequence.
    let sum = |phase: &Value, key: &str| list(&phase["ops"]).iter().map(|op| number(&op[key])).sum::<f64>();
    let of_decode = |key: &str| sum(&three[1], key) / sum(&one[1], key);
    assert!((of_decode("weight_bytes") - 1.0).abs() < 0.01 && of_decode("kv_bytes") == 3.0, "{one:?} {three:?}");
    let refused = exe.run(["profile", "-p", "50", "-b", "4"]);
    assert!(refused.code == Some(2) && refused.stderr.contains("at most 3 sequences"), "{refused:?}");
}

/// Steps follow each other in each lane, laps lie inside their step and follow each other, every region occurs.
fn check_trace(trace: &Value, names: &[String]) {
    let events: Vec<&Value> = list(&trace["traceEvents"]).iter().filter(|e| e["ph"] == "X").collect();
    for thread in 0..2 {
        let lane = events.iter().filter(|e| e["tid"] == thread);
        let (mut step_begin, mut step_end, mut last, mut seen) = (0.0, 0.0, 0.0, vec![]);
        for event in lane {
            let (name, begin) = (event["name"].as_str().unwrap(), number(&event["ts"]));
            let end = begin + number(&event["dur"]);
            seen.push(name);
            if name.ends_with(" step") {
                assert!(begin + 0.001 >= step_end);
                (step_begin, step_end, last) = (begin, end, begin);
            } else {
                assert!(begin + 0.001 >= last && begin + 0.001 >= step_begin && end <= step_end + 0.001, "{event}");
                last = end;
            }
        }
        assert_eq!(seen.iter().filter(|n| n.ends_with(" step")).count(), 22);
        assert!(names.iter().all(|n| seen.contains(&n.as_str())) && seen.contains(&"(wait)"), "{names:?}");
    }
}

#[test]
fn a_bench_counts_weights_and_cache() {
    let exe = demo();
    let rows = exe.text(["bench", "-p", "0", "-n", "8", "-d", "0,200", "-b", "1", "-t", "1,2", "-r", "2", "-o", "jsonl"]);
    let rows: Vec<Value> = rows.lines().map(|l| serde_json::from_str(l).expect("JSON")).collect();
    let names: Vec<(&str, u64)> = rows.iter().map(|r| (r["test"].as_str().unwrap(), r["threads"].as_u64().unwrap())).collect();
    assert_eq!(names, [("tg8", 1), ("tg8@d200", 1), ("tg8", 2), ("tg8@d200", 2)]);
    let per_token = exe.json(["info"])["state"]["bytes_per_token"].as_f64().expect("a cache");
    for pair in rows.chunks(2) {
        // Bytes per token: the rate times the mean time.
        let bytes = |row: &Value| {
            let samples = list(&row["samples_ts"]);
            number(&row["gb_per_s"]) * 1e9 * samples.iter().map(|t| 1.0 / number(t)).sum::<f64>() / samples.len() as f64
        };
        let weights = number(&pair[0]["weight_bytes"]);
        assert_eq!(pair[0]["weight_bytes"], pair[1]["weight_bytes"]);
        assert!(bytes(&pair[0]) > weights * 0.9 && bytes(&pair[0]) < weights * 1.2, "{}", pair[0]);
        // 200 positions more, each read once.
        let more = bytes(&pair[1]) - bytes(&pair[0]);
        assert!((more / (200.0 * per_token) - 1.0).abs() < 0.2, "{more} of {}", 200.0 * per_token);
    }
}

#[test]
fn scaling_is_predicted_from_a_directory_and_from_an_executable() {
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo/model");
    let note = |args: &[&str]| -> Value {
        let out = rcompile(&[&["inspect", "--scaling", "--json"], args].concat());
        serde_json::from_str(&out).unwrap_or_else(|e| panic!("{e}: {out}"))
    };
    let path = model.to_string_lossy().into_owned();
    let of_dir = note(&[&path, "--cpu", "znver5"]);
    assert_eq!(of_dir["phases"][0]["phase"], "decode");
    let cores: Vec<u64> = list(&of_dir["phases"][0]["cores"]).iter().map(|t| t["cores"].as_u64().unwrap()).collect();
    assert_eq!(cores, [1, 2, 16, 64, 96]);
    // One core is bound by its bandwidth or arithmetic; the whole is never slower per core than that, and barriers are counted.
    let decode = &of_dir["phases"][0];
    let barriers = decode["barriers"].as_u64().unwrap();
    assert!((4 * 4..=4 * 5 + 5).contains(&barriers), "{barriers}");
    let single = &decode["cores"][0];
    let gb_per_s = number(&decode["memory_bytes"]) / number(&single["ms"]) / 1e6;
    assert!(gb_per_s > 30.0 && gb_per_s <= 39.0001, "{gb_per_s}");
    // Half the bandwidth, half the speed of one core.
    let slow = note(&[&path, "--cpu", "znver5", "--bandwidth", "19.5"]);
    let ratio = number(&slow["phases"][0]["cores"][0]["ms"]) / number(&single["ms"]);
    assert!(ratio > 1.9 && ratio < 2.01, "{ratio}");
    let text = rcompile(&["inspect", "--scaling", &path, "--cpu", "znver5"]);
    assert!(text.contains("layers.attention") && text.contains("m8a"), "{text}");
    // An executable need not run here to be asked.
    let exe = build(&model, "--cpu znver5");
    assert_eq!(note(&[&exe.path().to_string_lossy()])["phases"], of_dir["phases"]);
}

/// `rcompile` in a process of its own: what it prints.
fn rcompile(args: &[&str]) -> String {
    // The driver's library in this process prints to this process's stdout; so a child of this test binary prints instead.
    let this = std::env::current_exe().expect("this binary");
    let mut command = Command::new(this);
    command.args(["--exact", "child", "--nocapture", "--quiet"]).env("RCOMPILE_TEST_ARGS", args.join("\n"));
    let out = exe::output(&mut command, b"");
    let text = String::from_utf8(out.stdout).expect("UTF-8");
    let (_, text) = text.split_once(MARK).unwrap_or_else(|| panic!("{}", String::from_utf8_lossy(&out.stderr)));
    text.split_once(MARK).expect("two marks").0.to_string()
}

const MARK: &str = "----- rcompile -----\n";

/// Runs a verb when [`rcompile`] asks for it; otherwise nothing.
#[test]
fn child() {
    let Some(args) = std::env::var_os("RCOMPILE_TEST_ARGS") else { return };
    let args = args.into_string().expect("UTF-8");
    let all = ["rcompile"].into_iter().chain(args.lines()).map(Into::into);
    let Ok(Parsed::Run(command)) = options::parse(all) else { panic!("{args}") };
    print!("{MARK}");
    rcompile::verbs::dispatch(command).unwrap_or_else(|e| panic!("{e}"));
    print!("{MARK}");
}
