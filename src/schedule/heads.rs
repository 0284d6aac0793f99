//! The competing heads in their order.

use std::collections::BTreeMap;

/// A head's score and its arrival number, which breaks ties.
pub(super) type Key = (i64, u64);

/// The flows whose heads compete, by the keys of their heads.
///
/// The first stands by itself: with one flow alone, the most common case, the map is never touched.
#[derive(Debug, Default)]
pub(super) struct Heads {
    first: Option<(Key, usize)>,
    others: BTreeMap<Key, usize>,
}

impl Heads {
    pub(super) fn first(&self) -> Option<(Key, usize)> {
        self.first
    }

    pub(super) fn is_empty(&self) -> bool {
        self.first.is_none()
    }

    pub(super) fn insert(&mut self, key: Key, flow: usize) {
        match self.first {
            None => self.first = Some((key, flow)),
            Some((first, second)) if key < first => {
                self.others.insert(first, second);
                self.first = Some((key, flow));
            }
            Some(_) => drop(self.others.insert(key, flow)),
        }
    }

    pub(super) fn remove(&mut self, key: Key) {
        if self.first.is_some_and(|(first, _)| first == key) {
            self.first = self.others.pop_first();
        } else {
            self.others.remove(&key);
        }
    }

    /// Moves all scores back by `by`.
    pub(super) fn rebase(&mut self, by: i64) {
        let moved = |((score, arrival), flow)| ((score - by, arrival), flow);
        self.first = self.first.map(moved);
        self.others = std::mem::take(&mut self.others).into_iter().map(moved).collect();
    }
}
