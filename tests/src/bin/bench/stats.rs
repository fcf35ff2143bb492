//! Samples of one figure, and the table of all figures.

use std::fmt::{self, Write as _};

/// Measurements of one figure in the order in which they were taken.
#[derive(Clone, Debug, Default)]
pub struct Samples(Vec<f64>);

impl Samples {
    pub fn values(&self) -> &[f64] {
        &self.0
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// The middle of the sorted samples, the mean of the two middle ones where their number is even; NaN without samples.
    pub fn median(&self) -> f64 {
        let mut sorted = self.0.clone();
        sorted.sort_by(f64::total_cmp);
        match sorted.len() {
            0 => f64::NAN,
            n if n.is_multiple_of(2) => (sorted[n / 2 - 1] + sorted[n / 2]) / 2.0,
            n => sorted[n / 2],
        }
    }

    pub fn min(&self) -> f64 {
        self.0.iter().copied().fold(f64::INFINITY, f64::min)
    }

    pub fn max(&self) -> f64 {
        self.0.iter().copied().fold(f64::NEG_INFINITY, f64::max)
    }

    pub fn map(&self, f: impl Fn(f64) -> f64) -> Self {
        Self(self.0.iter().map(|&v| f(v)).collect())
    }
}

impl FromIterator<f64> for Samples {
    fn from_iter<I: IntoIterator<Item = f64>>(values: I) -> Self {
        Self(values.into_iter().collect())
    }
}

impl From<f64> for Samples {
    fn from(value: f64) -> Self {
        Self(vec![value])
    }
}

/// What a figure should be.
#[derive(Clone, Copy, Debug)]
pub enum Goal {
    AtMost(f64),
    AtLeast(f64),
}

impl Goal {
    pub fn is_met_by(self, value: f64) -> bool {
        match self {
            Self::AtMost(bound) => value <= bound,
            Self::AtLeast(bound) => value >= bound,
        }
    }

    /// `>= 88, met`
    pub fn verdict(self, value: f64) -> String {
        let word = if self.is_met_by(value) { "met" } else { "MISSED" };
        format!("{self}, {word}")
    }
}

impl fmt::Display for Goal {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        match self {
            Self::AtMost(bound) => write!(f, "<= {}", number(*bound)),
            Self::AtLeast(bound) => write!(f, ">= {}", number(*bound)),
        }
    }
}

/// One line of the table.
#[derive(Clone, Debug)]
pub struct Figure {
    pub name: String,
    pub unit: &'static str,
    pub samples: Samples,
    /// What the samples say about a goal, or another remark.
    pub remark: String,
}

/// A part of the table with its own heading and a sentence on how it was measured.
#[derive(Debug)]
pub struct Section {
    pub title: String,
    pub note: String,
    pub figures: Vec<Figure>,
}

impl Section {
    pub fn new(title: impl Into<String>, note: impl Into<String>) -> Self {
        Self { title: title.into(), note: note.into(), figures: Vec::new() }
    }

    /// Adds a figure without a goal.
    pub fn add(&mut self, name: impl Into<String>, unit: &'static str, samples: impl Into<Samples>) {
        self.add_remark(name, unit, samples, String::new());
    }

    /// Adds a figure that is compared with a goal.
    pub fn add_goal(&mut self, name: impl Into<String>, unit: &'static str, samples: impl Into<Samples>, goal: Goal) {
        let samples = samples.into();
        let verdict = goal.verdict(samples.median());
        self.add_remark(name, unit, samples, verdict);
    }

    /// Adds a share in percent, which may have a goal.
    pub fn add_share(&mut self, name: String, samples: Samples, goal: Option<Goal>) {
        match goal {
            Some(goal) => self.add_goal(name, "%", samples, goal),
            None => self.add(name, "%", samples),
        }
    }

    pub fn add_remark(&mut self, name: impl Into<String>, unit: &'static str, samples: impl Into<Samples>, remark: String) {
        self.figures.push(Figure { name: name.into(), unit, samples: samples.into(), remark });
    }

    /// Rows of cells, the head first.
    fn cells(&self) -> Vec<[String; 7]> {
        let mut rows = vec![["figure", "unit", "median", "min", "max", "n", ""].map(String::from)];
        for figure in self.figures.iter().filter(|f| !f.samples.is_empty()) {
            let s = &figure.samples;
            rows.push([
                figure.name.clone(),
                figure.unit.into(),
                number(s.median()),
                number(s.min()),
                number(s.max()),
                s.values().len().to_string(),
                figure.remark.clone(),
            ]);
        }
        rows
    }

    /// Aligned columns for a terminal.
    pub fn text(&self) -> String {
        let rows = self.cells();
        let width = |column: usize| rows.iter().map(|row| row[column].chars().count()).max().unwrap_or(0);
        let widths: [usize; 7] = std::array::from_fn(width);
        let mut out = format!("{}\n", self.title);
        for row in &rows {
            let mut line = String::from(" ");
            for (column, cell) in row.iter().enumerate() {
                let w = widths[column];
                // Numbers to the right, words to the left.
                let _ = if (2..=5).contains(&column) { write!(line, " {cell:>w$} ") } else { write!(line, " {cell:<w$} ") };
            }
            let _ = writeln!(out, "{}", line.trim_end());
        }
        out
    }

    pub fn markdown(&self) -> String {
        let mut out = format!("#### {}\n{}\n\n", self.title, self.note);
        for (index, row) in self.cells().iter().enumerate() {
            let _ = writeln!(out, "| {} |", row.join(" | "));
            if index == 0 {
                out += "|---|---|---:|---:|---:|---:|---|\n";
            }
        }
        out
    }
}

/// Four significant digits, never an exponent.
pub fn number(value: f64) -> String {
    if !value.is_finite() {
        return "-".into();
    }
    let magnitude = value.abs();
    let decimals = match magnitude {
        0.0 => 0,
        m if m >= 1000.0 => 0,
        m => (3 - m.log10().floor() as i32).clamp(0, 6) as usize,
    };
    let text = format!("{value:.decimals$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_short_and_keep_four_digits() {
        let shown = [0.0, 0.01234567, 1.5, 64.0, 123.456, 2_471_628_800.0, f64::NAN].map(number);
        assert_eq!(shown, ["0", "0.01235", "1.5", "64", "123.5", "2471628800", "-"]);
    }

    #[test]
    fn medians_of_odd_and_even_counts() {
        assert_eq!(Samples(vec![3.0, 1.0, 2.0]).median(), 2.0);
        assert_eq!(Samples(vec![4.0, 1.0]).median(), 2.5);
        assert!(Samples::default().median().is_nan());
    }

    #[test]
    fn a_goal_is_marked() {
        let mut section = Section::new("start", "from outside");
        section.add_goal("info", "ms", Samples(vec![10.0, 30.0, 12.0]), Goal::AtMost(20.0));
        section.add_goal("share", "%", 60.0, Goal::AtLeast(70.0));
        let text = section.text();
        assert!(text.contains("<= 20, met") && text.contains(">= 70, MISSED"), "{text}");
        assert!(section.markdown().contains("| info | ms | 12 | 10 | 30 | 3 | <= 20, met |"));
    }
}
