use std::time::Duration;

use super::super::listener::{FURTHEST_BEHIND, PATIENCE};
use super::*;

/// A container of which one end of stdout is here.
fn running() -> (Running, File) {
    let (reader, writer) = std::io::pipe().unwrap();
    let running = Running {
        spec: spec::Container::default(),
        status: Status::default(),
        child: None,
        starting: None,
        output: [Some(patient(reader.into()).unwrap()), None],
        terminal: None,
        stdin: None,
        to_stdin: Vec::new(),
        stdin_ends: false,
        identity: None,
        log: Log::open(None).unwrap(),
        listeners: Vec::new(),
    };
    (running, patient(writer.into()).unwrap())
}

fn attach(running: &mut Running, connection: u64) -> File {
    let (reader, writer) = std::io::pipe().unwrap();
    running.listeners.push(Listener::new(connection, None, [Some(writer.into()), None]).unwrap());
    patient(reader.into()).unwrap()
}

fn end(running: &mut Running) {
    running.end(Ended::Exited(0), false);
}

/// All that there is to read at the moment.
fn taken(file: &mut File) -> Vec<u8> {
    let mut all = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(count) = file.read(&mut buffer)
        && count > 0
    {
        all.extend_from_slice(&buffer[..count]);
    }
    all
}

/// Says so much, or as much as is heard.
fn say(running: &mut Running, mouth: &mut File, most: usize) -> usize {
    let mut said = 0;
    let piece: Vec<u8> = (0..4096).map(|at| u8::try_from(at % 251).unwrap()).collect();
    while said < most {
        match mouth.write(&piece[..piece.len().min(most - said)]) {
            Ok(count) => said += count,
            Err(_) if running.is_held(Stream::Out) => break,
            Err(_) => drop(running.hear(Stream::Out)),
        }
    }
    running.hear(Stream::Out);
    said
}

#[test]
fn a_slow_listener_is_waited_for_and_hears_all() {
    let (mut running, mut mouth) = running();
    let mut ear = attach(&mut running, 1);
    let said = say(&mut running, &mut mouth, 8 * FURTHEST_BEHIND);
    assert!(running.is_held(Stream::Out) && said < 2 * FURTHEST_BEHIND, "{said}");
    assert!(running.deadline().is_some());
    let mut heard = 0;
    while heard < said {
        let now = taken(&mut ear);
        assert!(!now.is_empty() && running.part(Instant::now()).is_empty(), "after {heard} of {said}");
        heard += now.len();
        running.listeners[0].flush(Stream::Out);
        running.hear(Stream::Out);
    }
    assert_eq!((heard, running.is_held(Stream::Out), running.deadline()), (said, false, None));
    end(&mut running);
    assert_eq!(running.part(Instant::now()), [(1, true)]);
}

#[test]
fn one_that_takes_nothing_is_sent_away() {
    let (mut running, mut mouth) = running();
    let _stalled = attach(&mut running, 1);
    // It also was the one to type.
    let (typed, _typing) = std::io::pipe().unwrap();
    running.listeners[0].stdin = Some(patient(typed.into()).unwrap());
    running.spec.stdin_once = true;
    let mut other = attach(&mut running, 2);
    let mut said = 0;
    while !running.is_held(Stream::Out) {
        said += say(&mut running, &mut mouth, 4096);
        taken(&mut other);
        running.listeners[1].flush(Stream::Out);
    }
    assert!(said >= FURTHEST_BEHIND);
    let deadline = running.deadline().unwrap();
    assert!(deadline <= Instant::now() + PATIENCE);
    assert_eq!(running.part(deadline - Duration::from_millis(1)), []);
    assert!(!running.stdin_ends);
    assert_eq!(running.part(deadline), [(1, false)]);
    assert!(running.stdin_ends, "nobody else types");
    // The container goes on for the other.
    assert!(!running.is_held(Stream::Out));
    assert_eq!(running.listeners.len(), 1);
    end(&mut running);
}

#[test]
fn last_words_are_waited_for() {
    let (mut running, mut mouth) = running();
    let mut ear = attach(&mut running, 1);
    let stalled = attach(&mut running, 2);
    let said = say(&mut running, &mut mouth, FURTHEST_BEHIND / 2);
    // More than a pipe holds, so that some of it is kept here; nobody waits for that as long as the container runs.
    assert_eq!((said, running.deadline()), (FURTHEST_BEHIND / 2, None));
    end(&mut running);
    assert_eq!(running.part(Instant::now()), []);
    let mut heard = 0;
    while heard < said {
        heard += taken(&mut ear).len();
        running.listeners[0].flush(Stream::Out);
    }
    assert_eq!(running.part(Instant::now()), [(1, true)]);
    let deadline = running.deadline().unwrap();
    assert_eq!(running.part(deadline), [(2, false)]);
    drop(stalled);
}
