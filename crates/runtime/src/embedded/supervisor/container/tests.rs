use std::time::Duration;

use super::super::listener::{MAX_PENDING_BYTES, WRITE_TIMEOUT};
use super::*;

/// A running container, and the write end of its stdout.
fn running() -> (RunningContainer, File) {
    let (reader, writer) = std::io::pipe().unwrap();
    let running = RunningContainer {
        spec: spec::Container::default(),
        status: RunStatus::default(),
        child: None,
        starting: None,
        output: [Some(nonblocking_file(reader.into()).unwrap()), None],
        terminal: None,
        stdin: None,
        to_stdin: Vec::new(),
        stdin_ends: false,
        identity: None,
        log: Log::open(None).unwrap(),
        listeners: Vec::new(),
    };
    (running, nonblocking_file(writer.into()).unwrap())
}

fn attach(running: &mut RunningContainer, connection: u64) -> File {
    let (reader, writer) = std::io::pipe().unwrap();
    running.listeners.push(Listener::new(connection, None, [Some(writer.into()), None]).unwrap());
    nonblocking_file(reader.into()).unwrap()
}

fn end(running: &mut RunningContainer) {
    running.end(ExitStatus::Exited(0), false);
}

/// Reads everything that is available.
fn read_available(file: &mut File) -> Vec<u8> {
    let mut all = Vec::new();
    let mut buffer = [0; 4096];
    while let Ok(count) = file.read(&mut buffer)
        && count > 0
    {
        all.extend_from_slice(&buffer[..count]);
    }
    all
}

/// Writes up to `most` bytes of output, or until the container is blocked.
fn write_output(running: &mut RunningContainer, stdout: &mut File, most: usize) -> usize {
    let mut written = 0;
    let chunk: Vec<u8> = (0..4096).map(|at| u8::try_from(at % 251).unwrap()).collect();
    while written < most {
        match stdout.write(&chunk[..chunk.len().min(most - written)]) {
            Ok(count) => written += count,
            Err(_) if running.is_blocked(OutputStream::Out) => break,
            Err(_) => drop(running.read_output(OutputStream::Out)),
        }
    }
    running.read_output(OutputStream::Out);
    written
}

#[test]
fn slow_listener_gets_all_output() {
    let (mut running, mut stdout) = running();
    let mut reader = attach(&mut running, 1);
    let written = write_output(&mut running, &mut stdout, 8 * MAX_PENDING_BYTES);
    assert!(running.is_blocked(OutputStream::Out) && written < 2 * MAX_PENDING_BYTES, "{written}");
    assert!(running.deadline().is_some());
    let mut received = 0;
    while received < written {
        let now = read_available(&mut reader);
        assert!(
            !now.is_empty() && running.take_finished_listeners(Instant::now()).is_empty(),
            "after {received} of {written}"
        );
        received += now.len();
        running.listeners[0].flush(OutputStream::Out);
        running.read_output(OutputStream::Out);
    }
    assert_eq!((received, running.is_blocked(OutputStream::Out), running.deadline()), (written, false, None));
    end(&mut running);
    assert_eq!(running.take_finished_listeners(Instant::now()), [(1, true)]);
}

#[test]
fn drops_a_listener_after_the_write_timeout() {
    let (mut running, mut stdout) = running();
    let _blocked_reader = attach(&mut running, 1);
    // This listener also has the stdin of the container.
    let (typed, _typing) = std::io::pipe().unwrap();
    running.listeners[0].stdin = Some(nonblocking_file(typed.into()).unwrap());
    running.spec.stdin_once = true;
    let mut other = attach(&mut running, 2);
    let mut written = 0;
    while !running.is_blocked(OutputStream::Out) {
        written += write_output(&mut running, &mut stdout, 4096);
        read_available(&mut other);
        running.listeners[1].flush(OutputStream::Out);
    }
    assert!(written >= MAX_PENDING_BYTES);
    let deadline = running.deadline().unwrap();
    assert!(deadline <= Instant::now() + WRITE_TIMEOUT);
    assert_eq!(running.take_finished_listeners(deadline - Duration::from_millis(1)), []);
    assert!(!running.stdin_ends);
    assert_eq!(running.take_finished_listeners(deadline), [(1, false)]);
    assert!(running.stdin_ends, "no other client has stdin");
    // The output continues for the other listener.
    assert!(!running.is_blocked(OutputStream::Out));
    assert_eq!(running.listeners.len(), 1);
    end(&mut running);
}

#[test]
fn listeners_drain_after_the_container_exits() {
    let (mut running, mut stdout) = running();
    let mut reader = attach(&mut running, 1);
    let blocked_reader = attach(&mut running, 2);
    let written = write_output(&mut running, &mut stdout, MAX_PENDING_BYTES / 2);
    // More than a pipe holds, so some bytes are pending. While the container runs, they have no
    // deadline.
    assert_eq!((written, running.deadline()), (MAX_PENDING_BYTES / 2, None));
    end(&mut running);
    assert_eq!(running.take_finished_listeners(Instant::now()), []);
    let mut received = 0;
    while received < written {
        received += read_available(&mut reader).len();
        running.listeners[0].flush(OutputStream::Out);
    }
    assert_eq!(running.take_finished_listeners(Instant::now()), [(1, true)]);
    let deadline = running.deadline().unwrap();
    assert_eq!(running.take_finished_listeners(deadline), [(2, false)]);
    drop(blocked_reader);
}
