use super::*;

/// A SYN_STREAM frame with uncompressed headers.
fn syn_stream_frame(stream: u32, headers: &[(&str, &str)], is_first: bool) -> Vec<u8> {
    let block = headers::stored_block(&headers::encode_headers(headers), is_first);
    let body = [&stream.to_be_bytes()[..], &[0; 6], &block].concat();
    [&[0x80, 3, 0, 1, 0][..], &(body.len() as u32).to_be_bytes()[1..], &body].concat()
}

#[test]
fn dictionary_checksum_matches_spdy_3() {
    let known = headers::dictionary();
    // The Adler-32 checksum of the dictionary, which every client writes before its first header
    // block.
    let (mut a, mut b) = (1u32, 0u32);
    for byte in known {
        a = (a + u32::from(*byte)) % 65_521;
        b = (b + a) % 65_521;
    }
    assert_eq!((known.len(), b << 16 | a), (1423, 0xe3c6_a7c2));
}

#[tokio::test]
async fn receiver_returns_streams_data_and_pings() {
    let data = [0, 0, 0, 3, 1, 0, 0, 2, b'h', b'i'];
    let ping = [0x80, 3, 0, 6, 0, 0, 0, 4, 0, 0, 0, 9];
    let bytes = [
        &syn_stream_frame(1, &[("streamtype", "error")], true)[..],
        &syn_stream_frame(3, &[("streamtype", "data"), ("port", "80")], false),
        &data,
        &ping,
    ]
    .concat();
    let mut receiver = Receiver::new(&bytes[..]);
    let mut frames = Vec::new();
    while let Some(frame) = receiver.next().await.unwrap() {
        frames.push(frame);
    }
    let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let expected = [
        Frame::Open { stream: 1, headers: vec![header("streamtype", "error")], is_last: false },
        Frame::Open {
            stream: 3,
            headers: vec![header("streamtype", "data"), header("port", "80")],
            is_last: false,
        },
        Frame::Data { stream: 3, bytes: b"hi".into(), is_last: true },
        Frame::Ping(9),
    ];
    assert_eq!(frames, expected);
}

#[tokio::test]
async fn rejects_malformed_frames() {
    for bytes in [
        &[0x80u8, 3, 0, 1, 0, 0, 0, 2, 1, 2][..],
        &[0x80, 3, 0, 1, 0, 255, 255, 255],
        &[0x80, 3, 0, 3, 0, 0, 0, 0],
    ] {
        assert!(Receiver::new(bytes).next().await.is_err(), "{bytes:?}");
    }
    let mut text = syn_stream_frame(1, &[("a", "b")], true);
    let last = text.len() - 1;
    text[last - 9] = 255;
    assert!(Receiver::new(&text[..]).next().await.is_err());
}

#[tokio::test]
async fn receiver_reads_frames_of_sender() {
    let mut sent = Vec::new();
    let mut sender = Sender::new(&mut sent);
    sender.open(1, &[("streamtype", "error")]).await.unwrap();
    sender.open(3, &[("streamtype", "stdin"), ("x", "")]).await.unwrap();
    sender.data(3, b"hi", true).await.unwrap();
    let mut receiver = Receiver::new(&sent[..]);
    let header = |name: &str, value: &str| (name.to_owned(), value.to_owned());
    let expected = [
        Frame::Open { stream: 1, headers: vec![header("streamtype", "error")], is_last: false },
        Frame::Open {
            stream: 3,
            headers: vec![header("streamtype", "stdin"), header("x", "")],
            is_last: false,
        },
        Frame::Data { stream: 3, bytes: b"hi".into(), is_last: true },
    ];
    for frame in expected {
        assert_eq!(receiver.next().await.unwrap(), Some(frame));
    }
}
