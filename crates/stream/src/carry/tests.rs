use expect_test::{Expect, expect};
use tokio::io::{DuplexStream, ReadHalf, WriteHalf, duplex};

use super::*;

/// A client's frame: masked, with zeros, which change nothing.
fn frame(kind: u8, body: &[u8]) -> Vec<u8> {
    let length = u16::try_from(body.len()).expect("short messages");
    [&[0x80 | kind, 0x80 | 126][..], &length.to_be_bytes(), &[0; 4], body].concat()
}

/// What the server's frames hold, a line each.
fn shown(mut bytes: &[u8]) -> String {
    let mut out = String::new();
    while let [first, second, rest @ ..] = bytes {
        let (length, rest) = match second {
            126 => (usize::from(u16::from_be_bytes([rest[0], rest[1]])), &rest[2..]),
            short => (usize::from(*short), rest),
        };
        let (body, rest) = rest.split_at(length);
        match (first & 0x0f, body) {
            (2, [channel, text @ ..]) => {
                out += &format!("{channel}: {}\n", String::from_utf8_lossy(text));
            }
            (10, text) => out += &format!("pong {}\n", String::from_utf8_lossy(text)),
            (8, _) => out += "close\n",
            (kind, _) => out += &format!("kind {kind}\n"),
        }
        bytes = rest;
    }
    out
}

struct Far {
    heard: spdy::Receiver<ReadHalf<DuplexStream>>,
    says: spdy::Sender<WriteHalf<DuplexStream>>,
}

/// A session that is being carried: the client's end, the far end, how it went.
fn session(wanted: Wanted) -> (DuplexStream, Far, tokio::task::JoinHandle<io::Result<()>>) {
    let ((client, client_end), (far, far_end)) = (duplex(1 << 10), duplex(1 << 10));
    let carried = tokio::spawn(channels(client_end, far_end, wanted));
    let (reader, writer) = tokio::io::split(far);
    (client, Far { heard: spdy::Receiver::new(reader), says: spdy::Sender::new(writer) }, carried)
}

const ALL: Wanted = Wanted { stdin: true, stdout: true, stderr: true, tty: false };

#[track_caller]
fn check(told: &[u8], expected: Expect) {
    expected.assert_eq(&shown(told));
}

#[tokio::test]
async fn every_channel_is_a_stream_and_the_status_comes_last() {
    let (mut client, mut far, carried) = session(ALL);
    let mut opened = Vec::new();
    for _ in 0..4 {
        let Some(Frame::Open { stream, headers, .. }) = far.heard.next().await.unwrap() else { panic!() };
        opened.push((stream, headers[0].1.clone()));
        far.says.accept(stream).await.unwrap();
    }
    let names = ["error", "stdin", "stdout", "stderr"];
    let expected: Vec<_> =
        names.iter().zip([1, 3, 5, 7]).map(|(name, at)| (at, (*name).to_owned())).collect();
    assert_eq!(opened, expected);
    let typed = [frame(2, b"\0hi"), frame(9, b"p"), frame(2, &[255, 0]), frame(2, b"\0late")].concat();
    client.write_all(&typed).await.unwrap();
    let heard = [far.heard.next().await.unwrap(), far.heard.next().await.unwrap()];
    let data = |bytes: &[u8], is_last| Some(Frame::Data { stream: 3, bytes: bytes.into(), is_last });
    assert_eq!(heard, [data(b"hi", false), data(b"", true)]);
    far.says.data(1, b"{status}", true).await.unwrap();
    far.says.data(5, b"out", false).await.unwrap();
    far.says.data(7, b"err", true).await.unwrap();
    far.says.reset(5).await.unwrap();
    let mut told = Vec::new();
    while !told.ends_with(&[0x88, 2, 3, 232]) {
        assert_ne!(client.read_buf(&mut told).await.unwrap(), 0, "{}", shown(&told));
    }
    client.write_all(&frame(8, &[3, 232])).await.unwrap();
    carried.await.unwrap().unwrap();
    // When the pong goes out is nobody's business.
    let told = shown(&told).replace("pong p\n", "");
    expect![[r#"
        1: 
        1: out
        2: err
        3: {status}
        close
    "#]]
    .assert_eq(&told);
}

#[tokio::test]
async fn neither_direction_waits_for_the_other() {
    let (client, far, _carried) = session(Wanted { stderr: false, ..ALL });
    let Far { mut heard, mut says } = far;
    for _ in 0..3 {
        heard.next().await.unwrap();
    }
    // A command that repeats what it is told, and a client that says all before it listens to the rest: more than
    // what fits on the way in either direction.
    let echo = tokio::spawn(async move {
        let mut count = 0;
        while let Ok(Some(Frame::Data { bytes, is_last, .. })) = heard.next().await {
            count += bytes.len();
            says.data(5, &bytes, is_last).await.unwrap();
            if is_last {
                says.data(1, b"{}", true).await.unwrap();
                break;
            }
        }
        (count, heard, says)
    });
    let (mut reader, mut writer) = tokio::io::split(client);
    let typing = tokio::spawn(async move {
        for _ in 0..100 {
            writer.write_all(&frame(2, &[&[0][..], &[b'x'; 1000]].concat())).await.unwrap();
        }
        writer.write_all(&frame(2, &[255, 0])).await.unwrap();
        writer
    });
    let mut told = Vec::new();
    while !told.ends_with(&[0x88, 2, 3, 232]) {
        assert_ne!(reader.read_buf(&mut told).await.unwrap(), 0);
    }
    assert_eq!(echo.await.unwrap().0, 100_000);
    drop(typing.await.unwrap());
    assert_eq!(shown(&told).matches('x').count(), 100_000);
}

#[tokio::test]
async fn a_far_end_that_breaks_is_a_failure() {
    let (mut client, far, carried) =
        session(Wanted { stdin: false, stdout: false, stderr: false, tty: true });
    drop(far);
    let mut told = Vec::new();
    while client.read_buf(&mut told).await.unwrap() > 0 && !told.ends_with(&[0x88, 2, 3, 232]) {}
    drop(client);
    // The far end may be gone before the streams are open, which is told by the end alone.
    if carried.await.unwrap().is_ok() {
        check(
            &told,
            expect![[r#"
            3: 
            3: {"code":500,"details":{"causes":[{"message":"error reading from error stream: unexpected EOF"}]},"message":"Internal error occurred: error reading from error stream: unexpected EOF","metadata":{},"reason":"InternalError","status":"Failure"}
            close
        "#]],
        );
    }
}

#[tokio::test]
async fn a_refusal_is_told_over_the_error_channel() {
    let (mut client, end) = duplex(1 << 10);
    let refused = tokio::spawn(async move { refuse(end, ALL, "{no}").await });
    let mut told = Vec::new();
    while !told.ends_with(&[0x88, 2, 3, 232]) {
        assert_ne!(client.read_buf(&mut told).await.unwrap(), 0);
    }
    drop(client);
    refused.await.unwrap().unwrap();
    check(
        &told,
        expect![[r#"
            1: 
            3: {no}
            close
        "#]],
    );
}

#[tokio::test]
async fn bytes_pass_through_a_tunnel() {
    let ((mut client, client_end), (mut far, far_end)) = (duplex(1 << 10), duplex(1 << 10));
    let carried = tokio::spawn(tunnel(client_end, far_end));
    client.write_all(&[frame(2, b"he"), frame(2, b"llo")].concat()).await.unwrap();
    let mut heard = [0; 5];
    far.read_exact(&mut heard).await.unwrap();
    assert_eq!(&heard, b"hello");
    far.write_all(b"back").await.unwrap();
    far.shutdown().await.unwrap();
    let mut told = Vec::new();
    while !told.ends_with(&[0x88, 2, 3, 232]) {
        assert_ne!(client.read_buf(&mut told).await.unwrap(), 0);
    }
    assert_eq!(told, b"\x82\x04back\x88\x02\x03\xe8");
    carried.await.unwrap().unwrap();
}
