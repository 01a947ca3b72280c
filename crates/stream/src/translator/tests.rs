use expect_test::{Expect, expect};
use tokio::io::{DuplexStream, ReadHalf, WriteHalf, duplex};

use super::*;

/// A client frame. It is masked with zeros, which leave the content unchanged.
fn frame(opcode: u8, body: &[u8]) -> Vec<u8> {
    let length = u16::try_from(body.len()).expect("short messages");
    [&[0x80 | opcode, 0x80 | 126][..], &length.to_be_bytes(), &[0; 4], body].concat()
}

/// The content of server frames, one per line.
fn render_frames(mut bytes: &[u8]) -> String {
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

struct SpdyUpstream {
    receiver: spdy::Receiver<ReadHalf<DuplexStream>>,
    sender: spdy::Sender<WriteHalf<DuplexStream>>,
}

/// A running session: the client side, the upstream side and its result.
fn session(session: SessionStreams) -> (DuplexStream, SpdyUpstream, tokio::task::JoinHandle<io::Result<()>>) {
    let ((client, client_end), (upstream, upstream_end)) = (duplex(1 << 10), duplex(1 << 10));
    let task = tokio::spawn(translate(client_end, upstream_end, session));
    let (reader, writer) = tokio::io::split(upstream);
    (client, SpdyUpstream { receiver: spdy::Receiver::new(reader), sender: spdy::Sender::new(writer) }, task)
}

const ALL_STREAMS: SessionStreams = SessionStreams { stdin: true, stdout: true, stderr: true, tty: false };

#[track_caller]
fn check(received: &[u8], expected: Expect) {
    expected.assert_eq(&render_frames(received));
}

#[tokio::test]
async fn creates_stream_per_channel_and_sends_status_last() {
    let (mut client, mut upstream, task) = session(ALL_STREAMS);
    let mut open_streams = Vec::new();
    for _ in 0..4 {
        let Some(Frame::Open { stream, headers, .. }) = upstream.receiver.next().await.unwrap() else {
            panic!()
        };
        open_streams.push((stream, headers[0].1.clone()));
        upstream.sender.accept(stream).await.unwrap();
    }
    let names = ["error", "stdin", "stdout", "stderr"];
    let expected: Vec<_> =
        names.iter().zip([1, 3, 5, 7]).map(|(name, at)| (at, (*name).to_owned())).collect();
    assert_eq!(open_streams, expected);
    let input = [frame(2, b"\0hi"), frame(9, b"p"), frame(2, &[255, 0]), frame(2, b"\0late")].concat();
    client.write_all(&input).await.unwrap();
    let frames = [upstream.receiver.next().await.unwrap(), upstream.receiver.next().await.unwrap()];
    let data = |bytes: &[u8], is_last| Some(Frame::Data { stream: 3, bytes: bytes.into(), is_last });
    assert_eq!(frames, [data(b"hi", false), data(b"", true)]);
    upstream.sender.data(1, b"{status}", true).await.unwrap();
    upstream.sender.data(5, b"out", false).await.unwrap();
    upstream.sender.data(7, b"err", true).await.unwrap();
    upstream.sender.reset(5).await.unwrap();
    let mut received = Vec::new();
    while !received.ends_with(&[0x88, 2, 3, 232]) {
        assert_ne!(client.read_buf(&mut received).await.unwrap(), 0, "{}", render_frames(&received));
    }
    client.write_all(&frame(8, &[3, 232])).await.unwrap();
    task.await.unwrap().unwrap();
    // The time of the pong is not deterministic.
    let rendered = render_frames(&received).replace("pong p\n", "");
    expect![[r#"
        1: 
        1: out
        2: err
        3: {status}
        close
    "#]]
    .assert_eq(&rendered);
}

#[tokio::test]
async fn client_and_upstream_do_not_block_each_other() {
    let (client, upstream, _carried) = session(SessionStreams { stderr: false, ..ALL_STREAMS });
    let SpdyUpstream { mut receiver, mut sender } = upstream;
    for _ in 0..3 {
        receiver.next().await.unwrap();
    }
    // A command that echoes its input, and a client that sends everything before it reads: more
    // data than the buffers hold in either direction.
    let echo = tokio::spawn(async move {
        let mut count = 0;
        while let Ok(Some(Frame::Data { bytes, is_last, .. })) = receiver.next().await {
            count += bytes.len();
            sender.data(5, &bytes, is_last).await.unwrap();
            if is_last {
                sender.data(1, b"{}", true).await.unwrap();
                break;
            }
        }
        (count, receiver, sender)
    });
    let (mut reader, mut writer) = tokio::io::split(client);
    let input_task = tokio::spawn(async move {
        for _ in 0..100 {
            writer.write_all(&frame(2, &[&[0][..], &[b'x'; 1000]].concat())).await.unwrap();
        }
        writer.write_all(&frame(2, &[255, 0])).await.unwrap();
        writer
    });
    let mut received = Vec::new();
    while !received.ends_with(&[0x88, 2, 3, 232]) {
        assert_ne!(reader.read_buf(&mut received).await.unwrap(), 0);
    }
    assert_eq!(echo.await.unwrap().0, 100_000);
    drop(input_task.await.unwrap());
    assert_eq!(render_frames(&received).matches('x').count(), 100_000);
}

#[tokio::test]
async fn reports_internal_error_when_upstream_closes_early() {
    let (mut client, upstream, task) =
        session(SessionStreams { stdin: false, stdout: false, stderr: false, tty: true });
    drop(upstream);
    let mut received = Vec::new();
    while client.read_buf(&mut received).await.unwrap() > 0 && !received.ends_with(&[0x88, 2, 3, 232]) {}
    drop(client);
    // If the upstream server closes before the streams are open, the client only sees the end of
    // the connection.
    if task.await.unwrap().is_ok() {
        check(
            &received,
            expect![[r#"
            3: 
            3: {"code":500,"details":{"causes":[{"message":"error reading from error stream: unexpected EOF"}]},"message":"Internal error occurred: error reading from error stream: unexpected EOF","metadata":{},"reason":"InternalError","status":"Failure"}
            close
        "#]],
        );
    }
}

#[tokio::test]
async fn reject_sends_status_over_error_channel() {
    let (mut client, end) = duplex(1 << 10);
    let reject_task = tokio::spawn(async move { reject(end, ALL_STREAMS, "{no}").await });
    let mut received = Vec::new();
    while !received.ends_with(&[0x88, 2, 3, 232]) {
        assert_ne!(client.read_buf(&mut received).await.unwrap(), 0);
    }
    drop(client);
    reject_task.await.unwrap().unwrap();
    check(
        &received,
        expect![[r#"
            1: 
            3: {no}
            close
        "#]],
    );
}

#[tokio::test]
async fn tunnel_copies_bytes_to_client_and_upstream() {
    let ((mut client, client_end), (mut upstream, upstream_end)) = (duplex(1 << 10), duplex(1 << 10));
    let task = tokio::spawn(tunnel_spdy(client_end, upstream_end));
    client.write_all(&[frame(2, b"he"), frame(2, b"llo")].concat()).await.unwrap();
    let mut upstream_received = [0; 5];
    upstream.read_exact(&mut upstream_received).await.unwrap();
    assert_eq!(&upstream_received, b"hello");
    upstream.write_all(b"back").await.unwrap();
    upstream.shutdown().await.unwrap();
    let mut received = Vec::new();
    while !received.ends_with(&[0x88, 2, 3, 232]) {
        assert_ne!(client.read_buf(&mut received).await.unwrap(), 0);
    }
    assert_eq!(received, b"\x82\x04back\x88\x02\x03\xe8");
    task.await.unwrap().unwrap();
}
