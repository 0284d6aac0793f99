//! What is logged, with the feature `tracing`. No other file names it; without the feature this does nothing.

#[cfg(feature = "redis")]
use crate::error::ConnectError;

#[cfg(feature = "redis")]
pub(crate) fn outage_entered(queue: &str) {
    #[cfg(feature = "tracing")]
    tracing::warn!(queue, "redis is out of reach, the outage policy decides");
    let _ = queue;
}

#[cfg(feature = "redis")]
pub(crate) fn outage_left(queue: &str) {
    #[cfg(feature = "tracing")]
    tracing::warn!(queue, "redis is back");
    let _ = queue;
}

#[cfg(feature = "redis")]
pub(crate) fn connection_lost(queue: &str, error: &ConnectError) {
    #[cfg(feature = "tracing")]
    tracing::debug!(queue, %error, "a connection to redis has failed");
    let _ = (queue, error);
}

#[cfg(feature = "redis")]
pub(crate) fn subscription_renewed(queue: &str) {
    #[cfg(feature = "tracing")]
    tracing::debug!(queue, "pushes stay away, subscribing anew");
    let _ = queue;
}
