//! Time that goes on while the machine sleeps: a lease does not wait for anybody.

use std::time::Duration;

/// Time since some fixed instant, which no setting of a clock changes.
#[cfg(target_os = "linux")]
pub(super) fn now() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    Duration::new(time.tv_sec.unsigned_abs(), u32::try_from(time.tv_nsec).unwrap_or_default())
}

/// Time since the first call, on the standard library's monotonic clock. Where that stands still while the machine sleeps, a
/// sleep longer than a lease is not seen by the node itself.
#[cfg(not(target_os = "linux"))]
pub(super) fn now() -> Duration {
    static START: std::sync::OnceLock<std::time::Instant> = std::sync::OnceLock::new();
    START.get_or_init(std::time::Instant::now).elapsed()
}
