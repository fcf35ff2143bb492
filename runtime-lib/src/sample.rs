//! From logits to the next token, and where a text ends.
//!
//! The order of steps is that of the model cards' recipes: repeat penalty, temperature, top-k, top-p, min-p. Equal
//! probabilities are ordered by token id, so that nothing depends on sorting.

/// How tokens are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Sampling {
    /// 0 takes the most probable token.
    pub temperature: f32,
    /// Keep the `top_k` most probable tokens, 0 keeps all.
    pub top_k: usize,
    /// Keep the most probable tokens until their probabilities reach `top_p`, 1 keeps all.
    pub top_p: f32,
    /// Drop tokens below `min_p` times the highest probability, 0 keeps all.
    pub min_p: f32,
    /// Divide positive and multiply negative logits of tokens that occurred, 1 changes nothing.
    pub repeat_penalty: f32,
    /// Start of the random sequence.
    pub seed: u64,
}

impl Sampling {
    /// The most probable token, always.
    pub const GREEDY: Self = Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, repeat_penalty: 1.0, seed: 0 };
}

/// SplitMix64 (Steele, Lea, Flood 2014): a counter in steps of the golden ratio, mixed. Small, and the same everywhere.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// The sequence that belongs to `seed`.
    pub fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next 64 bits.
    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1), 53 bits.
    pub fn next_f64(&mut self) -> f64 {
        (self.next_u64() >> 11) as f64 / (1u64 << 53) as f64
    }
}

/// Chooses the tokens of one sequence. Allocates nothing per token.
pub struct Sampler {
    sampling: Sampling,
    random: Random,
    occurred: Vec<bool>,
    /// (logit over temperature, id); after the cut (probability weight, id).
    kept: Vec<(f32, u32)>,
}

impl Sampler {
    /// A sampler for a vocabulary of `vocab_size` ids.
    pub fn new(sampling: Sampling, vocab_size: usize) -> Self {
        let penalty = sampling.repeat_penalty != 1.0;
        let random = sampling.temperature > 0.0;
        Self {
            random: Random::new(sampling.seed),
            occurred: vec![false; if penalty { vocab_size } else { 0 }],
            kept: Vec::with_capacity(if random { vocab_size } else { 0 }),
            sampling,
        }
    }

    /// Tells of tokens that occurred, in the prompt or generated.
    pub fn saw(&mut self, tokens: &[u32]) {
        for &token in tokens {
            if let Some(occurred) = self.occurred.get_mut(token as usize) {
                *occurred = true;
            }
        }
    }

    /// Another sequence begins: nothing occurred yet.
    pub fn forget(&mut self) {
        self.occurred.fill(false);
    }

    /// The next token.
    pub fn choose(&mut self, logits: &[f32]) -> u32 {
        let penalty = self.sampling.repeat_penalty;
        let occurred = &self.occurred;
        let logit = |id: usize| match logits[id] {
            l if !occurred.get(id).copied().unwrap_or(false) => l,
            l if l > 0.0 => l / penalty,
            l => l * penalty,
        };
        let all = (0..logits.len()).map(|id| (logit(id), id as u32));
        if self.sampling.temperature <= 0.0 {
            return highest(all);
        }
        self.kept.clear();
        self.kept.extend(all.filter(|(l, _)| !l.is_nan()));
        if self.kept.is_empty() {
            return 0;
        }
        let top_k = match self.sampling.top_k {
            0 => self.kept.len(),
            k => k.min(self.kept.len()),
        };
        keep_first(&mut self.kept, top_k);
        let max = self.kept.iter().map(|k| k.0).fold(f32::NEG_INFINITY, f32::max);
        if !max.is_finite() {
            return highest(self.kept.iter().copied());
        }
        let mut sum = 0.0f64;
        for (l, _) in &mut self.kept {
            *l = ((*l - max) / self.sampling.temperature).exp();
            sum += f64::from(*l);
        }
        if self.sampling.top_p < 1.0 {
            sum = self.cut_top_p(sum);
        }
        if self.sampling.min_p > 0.0 {
            let least = self.sampling.min_p; // weights are relative to the highest, which is 1
            self.kept.retain(|k| k.0 >= least);
            sum = self.kept.iter().map(|k| f64::from(k.0)).sum();
        }
        let mut target = self.random.next_f64() * sum;
        for &(weight, id) in &self.kept {
            target -= f64::from(weight);
            if target < 0.0 {
                return id;
            }
        }
        self.kept.last().map_or(0, |k| k.1)
    }

    /// Keeps the fewest most probable tokens that reach `top_p` of `sum`; returns what they sum to.
    fn cut_top_p(&mut self, sum: f64) -> f64 {
        let goal = f64::from(self.sampling.top_p) * sum;
        // Mostly a few tokens carry nearly everything: look at the largest first, and at more only if needed.
        let mut look = 64.min(self.kept.len());
        loop {
            if look < self.kept.len() {
                self.kept.select_nth_unstable_by(look - 1, most_probable_first);
            }
            self.kept[..look].sort_unstable_by(most_probable_first);
            let mut reached = 0.0;
            for i in 0..look {
                reached += f64::from(self.kept[i].0);
                if reached >= goal {
                    self.kept.truncate(i + 1);
                    return reached;
                }
            }
            if look == self.kept.len() {
                return reached;
            }
            look = (look * 8).min(self.kept.len());
        }
    }
}

fn most_probable_first(a: &(f32, u32), b: &(f32, u32)) -> std::cmp::Ordering {
    b.0.total_cmp(&a.0).then(a.1.cmp(&b.1))
}

fn keep_first(kept: &mut Vec<(f32, u32)>, count: usize) {
    if count < kept.len() {
        kept.select_nth_unstable_by(count - 1, most_probable_first);
        kept.truncate(count);
        kept.sort_unstable_by(most_probable_first);
    }
}

/// The id of the highest logit; of equal ones the lowest.
fn highest(logits: impl Iterator<Item = (f32, u32)>) -> u32 {
    let mut best = (f32::NEG_INFINITY, 0);
    for (logit, id) in logits {
        if logit > best.0 {
            best = (logit, id);
        }
    }
    best.1
}

/// The `count` highest logits with their ids, highest first.
pub fn top(logits: &[f32], count: usize) -> Vec<(u32, f32)> {
    let mut all: Vec<(f32, u32)> = logits.iter().copied().zip(0..).collect();
    let count = count.min(all.len());
    if count == 0 {
        return Vec::new();
    }
    keep_first(&mut all, count);
    all.sort_unstable_by(most_probable_first);
    all.into_iter().map(|(logit, id)| (id, logit)).collect()
}

/// Negative log-likelihood of `token` under softmax of `logits`.
pub fn nll(logits: &[f32], token: u32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let sum: f64 = logits.iter().map(|&l| f64::from(l - max).exp()).sum();
    f64::from(max) + sum.ln() - f64::from(logits[token as usize])
}

/// Holds back text that may be the beginning of a stop string, so that none of it is ever shown.
#[derive(Clone, Debug, Default)]
pub struct StopFilter {
    stops: Vec<String>,
    held: String,
}

impl StopFilter {
    /// Stops at the first occurrence of any of `stops`; empty strings are ignored.
    pub fn new(stops: impl IntoIterator<Item = String>) -> Self {
        Self { stops: stops.into_iter().filter(|s| !s.is_empty()).collect(), held: String::new() }
    }

    /// Takes the next piece; returns what may be shown, and true when a stop string was met.
    pub fn push(&mut self, piece: &str) -> (String, bool) {
        self.held.push_str(piece);
        let first = self.stops.iter().filter_map(|s| self.held.find(s.as_str())).min();
        if let Some(at) = first {
            self.held.truncate(at);
            return (std::mem::take(&mut self.held), true);
        }
        let keep = self.stops.iter().map(|s| self.open_prefix(s)).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - keep);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// What was held back, when no more text comes.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Length of the longest end of the held text that begins `stop`.
    fn open_prefix(&self, stop: &str) -> usize {
        (1..stop.len().min(self.held.len() + 1)).rev().find(|&n| stop.is_char_boundary(n) && self.held.ends_with(&stop[..n])).unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampling(temperature: f32) -> Sampling {
        Sampling { temperature, ..Sampling::GREEDY }
    }

    fn share(sampling: Sampling, logits: &[f32]) -> Vec<f64> {
        let mut sampler = Sampler::new(sampling, logits.len());
        let mut counts = vec![0.0; logits.len()];
        for _ in 0..20_000 {
            counts[sampler.choose(logits) as usize] += 1.0 / 20_000.0;
        }
        counts
    }

    #[test]
    fn greedy_takes_the_lowest_id_of_equals() {
        for (logits, expected) in [(&[1.0, 3.0, 3.0, 2.0][..], 1), (&[f32::NAN, -1.0], 1), (&[], 0)] {
            assert_eq!(Sampler::new(Sampling::GREEDY, logits.len()).choose(logits), expected);
        }
    }

    #[test]
    fn the_random_sequence_is_fixed() {
        // First outputs of SplitMix64 for seed 0, as published with the algorithm.
        let mut random = Random::new(0);
        assert_eq!(random.next_u64(), 0xe220_a839_7b1d_cdaf);
        assert_eq!(random.next_u64(), 0x6e78_9e6a_a1b9_65f4);
        let x = random.next_f64();
        assert!((0.0..1.0).contains(&x));
    }

    #[test]
    fn tokens_come_with_their_probability() {
        let logits = [0.0, 1.0f32.ln() + 1.0, 0.5, f32::NEG_INFINITY];
        let got = share(sampling(0.7), &logits);
        let weights: Vec<f64> = logits.iter().map(|&l| (f64::from(l) / 0.7).exp()).collect();
        let sum: f64 = weights.iter().sum();
        for (g, w) in got.iter().zip(&weights) {
            assert!((g - w / sum).abs() < 0.015, "{got:?}");
        }
        assert_eq!(got[3], 0.0);
        let again = share(sampling(0.7), &logits);
        assert_eq!(got, again);
        assert_ne!(got, share(Sampling { seed: 9, ..sampling(0.7) }, &logits));
    }

    #[test]
    fn cuts_keep_what_they_say() {
        // Probabilities 0.1, 0.4, 0.3, 0.2.
        let logits: Vec<f32> = [0.1f32, 0.4, 0.3, 0.2].iter().map(|p| p.ln()).collect();
        let kept = |s: Sampling| -> Vec<bool> { share(s, &logits).iter().map(|&p| p > 0.0).collect() };
        assert_eq!(kept(Sampling { top_k: 2, ..sampling(1.0) }), [false, true, true, false]);
        assert_eq!(kept(Sampling { top_p: 0.69, ..sampling(1.0) }), [false, true, true, false]);
        assert_eq!(kept(Sampling { top_p: 0.71, ..sampling(1.0) }), [false, true, true, true]);
        assert_eq!(kept(Sampling { top_p: 0.0, ..sampling(1.0) }), [false, true, false, false]);
        assert_eq!(kept(Sampling { min_p: 0.6, ..sampling(1.0) }), [false, true, true, false]);
        assert_eq!(kept(Sampling { top_k: 99, ..sampling(1.0) }), [true; 4]);
        // What is left shares the whole.
        let got = share(Sampling { min_p: 0.6, ..sampling(1.0) }, &logits);
        assert!((got[1] - 4.0 / 7.0).abs() < 0.015 && (got[2] - 3.0 / 7.0).abs() < 0.015, "{got:?}");
        assert!(share(Sampling { min_p: 1.0, ..sampling(1.0) }, &[0.0, 2.0, 1.0])[1] > 0.99999);
    }

    /// With one seed the same draws take tokens of the same probabilities.
    #[test]
    fn top_k_does_not_depend_on_the_order_of_ids() {
        let drawn = |stride: usize| -> Vec<f32> {
            let mut logits = [0.0; 40];
            (0..40).for_each(|rank| logits[rank * stride % 40] = -(rank as f32));
            let mut sampler = Sampler::new(Sampling { top_k: 20, ..sampling(10.0) }, 40);
            (0..100).map(|_| logits[sampler.choose(&logits) as usize]).collect()
        };
        assert_eq!(drawn(1), drawn(7));
        assert_eq!(drawn(1), drawn(39));
    }

    #[test]
    fn top_p_looks_further_where_it_must() {
        let logits = vec![0.0; 5000];
        let mut sampler = Sampler::new(Sampling { top_p: 0.5, ..sampling(1.0) }, 5000);
        for _ in 0..200 {
            assert!(sampler.choose(&logits) < 2500); // equal ones are ordered by id
        }
        assert!(sampler.kept.len().abs_diff(2500) <= 1);
        // Wherever they are: the probabilities go down by 1 % each, and the first 62 sum to 46 %.
        let logit = |rank: usize| -(rank as f32) / 100.0;
        for stride in [1, 13, 29, 41] {
            let logits: Vec<f32> = (0..5000).map(|id| logit(id * stride % 5000)).collect();
            let mut sampler = Sampler::new(Sampling { top_p: 0.46, ..sampling(1.0) }, 5000);
            sampler.choose(&logits);
            let kept: Vec<f32> = sampler.kept.iter().map(|k| logits[k.1 as usize]).collect();
            assert_eq!(kept, (0..62).map(logit).collect::<Vec<_>>(), "{stride}");
        }
    }

    #[test]
    fn the_penalty_lowers_what_occurred() {
        let mut sampler = Sampler::new(Sampling { repeat_penalty: 2.0, ..Sampling::GREEDY }, 3);
        assert_eq!(sampler.choose(&[3.0, 2.0, -1.0]), 0);
        sampler.saw(&[0]);
        assert_eq!(sampler.choose(&[3.0, 2.0, -1.0]), 1);
        sampler.saw(&[1, 99]);
        assert_eq!(sampler.choose(&[-1.0, -3.0, -1.5]), 2);
        sampler.forget();
        assert_eq!(sampler.choose(&[3.0, 2.0, -1.0]), 0);
    }

    #[test]
    fn degenerate_logits_still_give_a_token() {
        let mut sampler = Sampler::new(sampling(1.0), 2);
        assert_eq!(sampler.choose(&[f32::NAN, f32::NAN]), 0);
        assert_eq!(sampler.choose(&[0.0, f32::INFINITY]), 1);
        assert_eq!(sampler.choose(&[f32::NEG_INFINITY, f32::NEG_INFINITY]), 0);
        for seed in 0..8 {
            let mut sampler = Sampler::new(Sampling { seed, ..sampling(1.0) }, 3);
            assert_eq!(sampler.choose(&[f32::NAN, 1.0, f32::NEG_INFINITY]), 1, "{seed}");
        }
        // Logits over such a temperature are beyond f32.
        for temperature in [1e-30, 1e-38, f32::from_bits(1)] {
            assert_eq!(Sampler::new(sampling(temperature), 3).choose(&[4.0, 9.0, 5.0]), 1, "{temperature}");
            assert_eq!(Sampler::new(sampling(temperature), 3).choose(&[-4.0, -9.0, -3.0]), 2, "{temperature}");
        }
    }

    #[test]
    fn top_is_sorted() {
        assert_eq!(top(&[1.0, 5.0, 3.0, 5.0], 3), [(1, 5.0), (3, 5.0), (2, 3.0)]);
        assert_eq!(top(&[1.0, 5.0, 3.0], 9), [(1, 5.0), (2, 3.0), (0, 1.0)]);
        assert!(top(&[1.0], 0).is_empty());
    }

    #[test]
    fn nll_is_minus_log_softmax() {
        assert!((nll(&[0.0, 0.0], 1) - 2.0f64.ln()).abs() < 1e-12);
        assert!((nll(&[1000.0, 0.0], 1) - 1000.0).abs() < 1e-9);
    }

    #[test]
    fn no_part_of_a_stop_string_is_shown() {
        let mut filter = StopFilter::new(["</end>".into(), "é!".into(), String::new()]);
        assert_eq!(filter.push("a <"), ("a ".into(), false));
        assert_eq!(filter.push("/e"), (String::new(), false));
        assert_eq!(filter.push("x"), ("</ex".into(), false));
        assert_eq!(filter.push("y</en"), ("y".into(), false));
        assert_eq!(filter.push("d> more"), (String::new(), true));
        let mut filter = StopFilter::new(["é!".into()]);
        assert_eq!(filter.push("caf\u{e9}"), ("caf".into(), false));
        assert_eq!(filter.push("s"), ("és".into(), false));
        assert_eq!(filter.push("é"), (String::new(), false));
        assert_eq!(filter.finish(), "é");
        // Of two in one piece the first counts, whichever was named first.
        for stops in [["yz", "bc"], ["bc", "yz"]] {
            assert_eq!(StopFilter::new(stops.map(String::from)).push("abcxyz"), ("a".into(), true));
        }
        let mut filter = StopFilter::new(["aab".into()]);
        assert_eq!(filter.push("aaa"), ("a".into(), false));
        assert_eq!(filter.push("b"), (String::new(), true));
    }
}
