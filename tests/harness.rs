//! What the tests take for granted of their own tools.

mod support;

use std::{path::Path, time::Duration};

use support::process::Process;

const SOON: Duration = Duration::from_secs(10);

#[tokio::test]
async fn process_is_heard_stopped_and_killed() {
    let script = "echo first; echo second; while read line; do echo got $line; done; echo end";
    let mut process = Process::spawn(Path::new("/bin/sh"), &["-c", script]);
    assert_eq!(process.wait_line("second", SOON).await, "second");
    assert_eq!(process.wait_line("first", SOON).await, "first");
    process.stop();
    process.say("it");
    process.cont();
    assert_eq!(process.wait_line("got", SOON).await, "got it");
    assert!(process.lines().is_empty());
    process.terminate();
    assert!(!process.ended(SOON).await.success());
}
