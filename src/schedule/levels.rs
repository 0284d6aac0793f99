//! Virtual time, kept for each level of priority.

use super::Priority;

/// How far the fair order has come at each level of priority, in *scores* (a tag less its level's head
/// start), since last nothing competed.
///
/// One virtual time for all levels would not do. A level with a head start is granted at scores below it,
/// so an endless stream of one-request flows at that level would never move it on, each would borrow
/// the whole head start anew, and a lower level would starve. So each level keeps its own progress,
/// and the head start is borrowed once by the level and not by each of its flows.
///
/// Three rules place a flow that joins at level `q`; `A` is the tag a level has come to, `h` its head start:
/// - not behind its own level: `start >= A[q]`, and not behind a lower one: `start >= A[r]`;
/// - a higher level may be ahead by the difference of the head starts and no more:
///   `start >= A[r] - (h[r] - h[q])`;
/// - where only higher levels compete, nobody has waited for what they borrowed, so the lower flow starts where
///   they are, and their head start over it is whole.
///
/// Hence, for flows of one level each (the property tests hold it exactly): between two backlogged flows the units served by weight
/// differ by at most one largest request of each and the difference of their head starts. The largest request counts a head that was
/// cancelled, since it leaves its claim to the next.
#[derive(Debug)]
pub(super) struct Levels {
    head_start: [i64; Priority::LEVELS],
    /// The highest score granted at the level.
    reached: [Option<i64>; Priority::LEVELS],
    /// How many flows compete with a head of this level.
    competing: [usize; Priority::LEVELS],
}

impl Levels {
    pub(super) fn new(step: i64) -> Self {
        let mut head_start = [0; Priority::LEVELS];
        for level in 1..Priority::LEVELS {
            head_start[level] = head_start[level - 1] + step;
        }
        Self { head_start, reached: [None; Priority::LEVELS], competing: [0; Priority::LEVELS] }
    }

    pub(super) fn head_start(&self, level: usize) -> i64 {
        self.head_start[level]
    }

    /// The virtual time at which a flow that joins the competition at `level` starts.
    pub(super) fn start(&mut self, level: usize) -> i64 {
        let start = self.time(level);
        if self.competing[..=level].iter().any(|&n| n > 0) {
            return start;
        }
        let above = (level + 1..Priority::LEVELS).filter(|&r| self.competing[r] > 0);
        match above.map(|r| self.time(r)).min() {
            Some(time) if time > start => {
                // Kept, so that who joins this level next does not start before this one.
                self.reached[level] = Some(time - self.head_start[level]);
                time
            }
            _ => start,
        }
    }

    fn time(&self, level: usize) -> i64 {
        let mut time = 0;
        for (reached, head_start) in self.reached.iter().zip(self.head_start) {
            if let Some(reached) = reached {
                time = time.max(reached + head_start.min(self.head_start[level]));
            }
        }
        time
    }

    pub(super) fn granted(&mut self, level: usize, score: i64) {
        let reached = &mut self.reached[level];
        *reached = Some(reached.map_or(score, |r| r.max(score)));
    }

    pub(super) fn join(&mut self, level: usize) {
        self.competing[level] += 1;
    }

    pub(super) fn leave(&mut self, level: usize) {
        self.competing[level] -= 1;
    }

    /// Nothing competes: what was borrowed and served is of no account to whoever comes next.
    pub(super) fn reset(&mut self) {
        debug_assert_eq!(self.competing, [0; Priority::LEVELS]);
        self.reached = [None; Priority::LEVELS];
    }

    pub(super) fn rebase(&mut self, by: i64) {
        for reached in self.reached.iter_mut().flatten() {
            *reached -= by;
        }
    }
}
