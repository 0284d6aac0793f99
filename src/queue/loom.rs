//! Every interleaving of a ticket's grant, deadline, cancellation and close, over the real memory backend.
//!
//! Run by `RUSTFLAGS="--cfg fair_queue_loom" cargo test --lib loom`, as `scripts/test` does.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Wake, Waker},
};

use loom::thread;

use crate::{
    backend::{Backend, Memory, Phase, Place, Ticket},
    config::TooWide,
    error::Cause,
    schedule::{Ask, Rules},
};

fn memory() -> Arc<Memory> {
    Arc::new(Memory::new(Rules {
        capacity: 1,
        flow_cap: u64::MAX,
        max_waiting: 10,
        max_waiting_per_flow: u64::MAX,
        too_wide: TooWide::RunAlone,
        priority_step: 1,
    }))
}

#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

struct Request {
    ticket: Arc<Ticket>,
    place: Place,
    woken: Arc<Count>,
}

impl Request {
    fn enter(memory: &Memory) -> Self {
        let ticket = Arc::new(Ticket::new());
        let place = memory.enqueue(&Ask::new(), &ticket, true).expect("the queue is open");
        Self { ticket, place, woken: Arc::default() }
    }

    fn poll(&self) -> Phase {
        self.poll_by(&self.woken)
    }

    /// As another task would.
    fn poll_by(&self, task: &Arc<Count>) -> Phase {
        let waker = Waker::from(Arc::clone(task));
        self.ticket.poll_phase(&Context::from_waker(&waker))
    }

    fn was_woken(&self) -> bool {
        self.woken.0.load(Ordering::SeqCst) > 0
    }

    /// As the drop of a wait does it.
    fn cancel(&self, memory: &Memory) {
        if !self.ticket.cancel() {
            self.ticket.end();
        }
        memory.finish(self.place);
    }

    /// As the deadline does it: what was granted in the same instant is used, and then released.
    fn time_out(&self, memory: &Memory) -> bool {
        let timed_out = self.ticket.time_out();
        if !timed_out {
            self.release(memory);
        }
        memory.finish(self.place);
        timed_out
    }

    fn release(&self, memory: &Memory) {
        if self.ticket.end() {
            memory.finish(self.place);
        }
    }
}

#[track_caller]
fn assert_idle(memory: &Memory) {
    let snapshot = memory.snapshot();
    assert_eq!((snapshot.in_flight, snapshot.waiting, memory.flows()), (0, 0, 0));
}

#[test]
fn loom_a_release_racing_a_cancel_reaches_the_next() {
    loom::model(|| {
        let memory = memory();
        let holder = Request::enter(&memory);
        let first = Request::enter(&memory);
        let second = Request::enter(&memory);
        assert_eq!(second.poll(), Phase::Pending);
        let release = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || holder.release(&memory))
        };
        let cancel = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || first.cancel(&memory))
        };
        release.join().unwrap();
        cancel.join().unwrap();
        assert_eq!(second.poll(), Phase::Granted { units: 1 });
        assert!(second.was_woken());
        assert_eq!(memory.snapshot().in_flight, 1);
        second.release(&memory);
        assert_idle(&memory);
    });
}

#[test]
fn loom_a_release_racing_a_deadline_ends_the_request_once_and_reaches_the_next() {
    loom::model(|| {
        let memory = memory();
        let holder = Request::enter(&memory);
        let first = Request::enter(&memory);
        let second = Request::enter(&memory);
        assert_eq!(second.poll(), Phase::Pending);
        let release = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || holder.release(&memory))
        };
        let (other, ticket) = (Arc::clone(&memory), Arc::clone(&first.ticket));
        let deadline = thread::spawn(move || first.time_out(&other));
        release.join().unwrap();
        deadline.join().unwrap();
        assert_eq!(ticket.phase(), Phase::Ended);
        assert_eq!(second.poll(), Phase::Granted { units: 1 });
        assert!(second.was_woken());
        second.release(&memory);
        assert_idle(&memory);
    });
}

#[test]
fn loom_close_grant_and_cancel_leave_one_outcome_each() {
    loom::model(|| {
        let memory = memory();
        let holder = Request::enter(&memory);
        let first = Request::enter(&memory);
        let second = Request::enter(&memory);
        assert_eq!(second.poll(), Phase::Pending);
        let threads = [
            {
                let memory = Arc::clone(&memory);
                thread::spawn(move || holder.release(&memory))
            },
            {
                let memory = Arc::clone(&memory);
                thread::spawn(move || first.cancel(&memory))
            },
            {
                let memory = Arc::clone(&memory);
                thread::spawn(move || memory.close(Cause::ShuttingDown))
            },
        ];
        threads.into_iter().for_each(|thread| thread.join().unwrap());
        assert!(second.was_woken());
        match second.poll() {
            Phase::Granted { .. } => second.release(&memory),
            Phase::Refused(cause) => assert_eq!(cause, Cause::ShuttingDown),
            other @ (Phase::Pending | Phase::Ended) => panic!("left {other:?}"),
        }
        assert_idle(&memory);
    });
}

#[test]
fn loom_a_grant_racing_a_registration_is_seen_or_wakes() {
    loom::model(|| {
        let memory = memory();
        let holder = Request::enter(&memory);
        let waiting = Request::enter(&memory);
        let release = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || holder.release(&memory))
        };
        let seen = waiting.poll() != Phase::Pending;
        release.join().unwrap();
        assert!(seen || waiting.was_woken(), "a lost wake-up");
        assert_eq!(waiting.poll(), Phase::Granted { units: 1 });
        waiting.release(&memory);
        assert_idle(&memory);
    });
}

#[test]
fn loom_a_grant_racing_a_move_to_another_task_is_seen_or_wakes_that() {
    loom::model(|| {
        let memory = memory();
        let holder = Request::enter(&memory);
        let waiting = Request::enter(&memory);
        assert_eq!(waiting.poll(), Phase::Pending);
        let release = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || holder.release(&memory))
        };
        let other = Arc::default();
        let seen = waiting.poll_by(&other) != Phase::Pending;
        release.join().unwrap();
        assert!(seen || other.0.load(Ordering::SeqCst) > 0, "a lost wake-up");
        assert_eq!(waiting.poll_by(&other), Phase::Granted { units: 1 });
        waiting.release(&memory);
        assert_idle(&memory);
    });
}

#[test]
fn loom_a_revocation_racing_a_registration_is_seen_or_wakes() {
    loom::model(|| {
        let memory = memory();
        let holder = Request::enter(&memory);
        let revoke = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || memory.revoke())
        };
        let waker = Waker::from(Arc::clone(&holder.woken));
        let seen = holder.ticket.poll_revoked(&Context::from_waker(&waker));
        revoke.join().unwrap();
        assert!(seen || holder.was_woken(), "a lost wake-up");
        assert!(holder.ticket.is_revoked());
        holder.release(&memory);
        assert_idle(&memory);
    });
}

#[test]
fn loom_two_releases_and_an_arrival_never_pass_the_capacity() {
    loom::model(|| {
        let memory = memory();
        let holder = Request::enter(&memory);
        let twice = {
            let (memory, ticket, place) = (Arc::clone(&memory), Arc::clone(&holder.ticket), holder.place);
            thread::spawn(move || {
                if ticket.end() {
                    memory.finish(place);
                }
            })
        };
        let arrival = {
            let memory = Arc::clone(&memory);
            thread::spawn(move || Request::enter(&memory))
        };
        holder.release(&memory);
        assert!(memory.snapshot().in_flight <= 1);
        twice.join().unwrap();
        let late = arrival.join().unwrap();
        assert_eq!(late.poll(), Phase::Granted { units: 1 });
        late.release(&memory);
        assert_idle(&memory);
    });
}
