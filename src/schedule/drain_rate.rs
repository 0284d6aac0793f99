//! How fast units come back while others wait for them.

use std::time::Duration;

/// The rate at which units are released while someone waits: a count that decays, so that the last half minute or so decides.
///
/// Time in which nobody waits does not count: what comes back then says how many came, and not how fast the queue could go.
#[derive(Debug, Default)]
pub(crate) struct DrainRate {
    units: f64,
    seen: f64,
    last: Duration,
    /// Released since `last`; counted with the next decay.
    fresh: u64,
    /// Releases until the clock is looked at again, and from that look to the next one.
    unseen: u32,
    stride: u32,
    counting: bool,
}

impl DrainRate {
    /// After so many seconds a release counts `1/e` of what it counted.
    const MEMORY: f64 = 15.0;

    /// How often the count decays at most. The decay needs an exponential, which most releases so do without.
    const STEP: Duration = Duration::from_millis(50);

    /// While releases come many to a step, the clock is looked at only every so many of them.
    const STRIDE: u32 = 8;

    /// Someone waits from `now` on, a time since some fixed start, or nobody does.
    pub(crate) fn count(&mut self, counting: bool, now: Duration) {
        if self.counting {
            self.decay(now);
        } else {
            self.last = self.last.max(now);
        }
        self.counting = counting;
    }

    /// `units` came back, at what `now` tells if it is asked.
    pub(crate) fn released(&mut self, units: u32, now: impl FnOnce() -> Duration) {
        if !self.counting {
            return;
        }
        self.fresh += u64::from(units);
        if self.unseen > 0 {
            self.unseen -= 1;
            return;
        }
        let now = now();
        if now > self.last + Self::STEP {
            self.decay(now);
            self.stride /= 2;
        } else {
            self.stride = (self.stride * 2 + 1).min(Self::STRIDE - 1);
        }
        self.unseen = self.stride;
    }

    /// How long until `units` more have come back, or `None` where none has yet.
    pub(crate) fn time_for(&mut self, units: u64, now: Duration) -> Option<Duration> {
        if self.counting {
            self.decay(now);
        }
        let rate = self.units / self.seen.max(f64::EPSILON);
        #[expect(clippy::cast_precision_loss, reason = "an estimate")]
        let seconds = units as f64 / rate;
        // A rate near 0 gives a time no `Duration` holds.
        Duration::try_from_secs_f64(seconds).ok()
    }

    /// `seen` is the time the counted units fell in, decayed like them; so the rate is right from the first
    /// second on, and not only once `MEMORY` has passed.
    fn decay(&mut self, now: Duration) {
        let elapsed = now.saturating_sub(self.last).as_secs_f64();
        if elapsed > 0.0 {
            let kept = (-elapsed / Self::MEMORY).exp();
            #[expect(clippy::cast_precision_loss, reason = "an estimate")]
            let fresh = std::mem::take(&mut self.fresh) as f64;
            self.units = (self.units + fresh) * kept;
            self.seen = self.seen * kept + Self::MEMORY * (1.0 - kept);
            self.last = now;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn near(found: Option<Duration>, seconds: f64) {
        let found = found.expect("a rate is known").as_secs_f64();
        assert!((found / seconds - 1.0).abs() < 0.05, "{found} s is not near {seconds} s");
    }

    fn steady(rate: &mut DrainRate, from_ms: u64, to_ms: u64, every_ms: u64, units: u32) {
        for ms in (from_ms..=to_ms).step_by(usize::try_from(every_ms).unwrap()).skip(1) {
            rate.released(units, || Duration::from_millis(ms));
        }
    }

    #[test]
    fn nothing_is_known_before_the_first_release() {
        let mut rate = DrainRate::default();
        assert_eq!(rate.time_for(3, Duration::ZERO), None);
        assert_eq!(rate.time_for(3, Duration::from_secs(9)), None);
    }

    #[test]
    fn a_steady_rate_is_found_within_seconds_and_follows_a_change() {
        let mut rate = DrainRate::default();
        rate.count(true, Duration::ZERO);
        steady(&mut rate, 0, 5_000, 100, 2);
        near(rate.time_for(40, Duration::from_secs(5)), 2.0);
        steady(&mut rate, 5_000, 125_000, 1_000, 1);
        near(rate.time_for(40, Duration::from_secs(125)), 40.0);
    }

    #[test]
    fn an_idle_queue_and_a_clock_that_steps_back_break_nothing() {
        let mut rate = DrainRate::default();
        rate.count(true, Duration::ZERO);
        rate.released(1, || Duration::from_secs(10));
        rate.released(1, || Duration::from_secs(5));
        assert!(rate.time_for(1, Duration::from_secs(10)).is_some());
        assert_eq!(rate.time_for(u64::MAX, Duration::from_secs(1_000_000_000)), None);
    }

    #[test]
    fn time_in_which_nobody_waits_does_not_count() {
        let mut rate = DrainRate::default();
        rate.count(true, Duration::ZERO);
        steady(&mut rate, 0, 50_000, 1_000, 1);
        rate.count(false, Duration::from_secs(50));
        rate.released(100, || Duration::from_secs(200));
        near(rate.time_for(1, Duration::from_secs(350)), 1.0);
        rate.count(true, Duration::from_secs(350));
        near(rate.time_for(1, Duration::from_secs(351)), 1.07);
    }

    #[test]
    fn a_burst_long_ago_is_no_rate_of_today() {
        let mut rate = DrainRate::default();
        rate.count(true, Duration::ZERO);
        rate.released(100, || Duration::from_millis(20));
        assert!(
            rate.time_for(1, Duration::from_secs(600)).is_none_or(|time| time > Duration::from_secs(3_600))
        );
    }
}
