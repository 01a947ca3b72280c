//! Response bodies: complete, generated in chunks, or streamed (watch).

use std::convert::Infallible;
use std::io::Write as _;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use futures_util::Stream;
use http_body::{Frame, SizeHint};

pub enum Body {
    Whole(Option<Bytes>),
    /// Generated as the client reads, so that a large list is never in memory as a whole.
    Chunks(Box<dyn Iterator<Item = Bytes> + Send>),
    Stream(Pin<Box<dyn Stream<Item = Bytes> + Send>>),
}

impl Body {
    pub fn empty() -> Body {
        Body::Whole(None)
    }

    /// Compresses complete and chunked bodies; streams are not compressed, as upstream.
    pub fn gzip(self) -> Body {
        match self {
            Body::Whole(Some(bytes)) => {
                let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
                let _ = encoder.write_all(&bytes);
                Body::Whole(Some(encoder.finish().unwrap_or_default().into()))
            }
            Body::Chunks(chunks) => Body::Chunks(Box::new(Gzip {
                chunks,
                encoder: Some(GzEncoder::new(Vec::new(), Compression::fast())),
            })),
            other => other,
        }
    }

    /// Keeps `guard` alive until the last chunk is generated.
    pub fn with_guard(self, guard: impl Send + 'static) -> Body {
        match self {
            Body::Chunks(chunks) => Body::Chunks(Box::new(ChunksWithGuard { chunks, guard: Some(guard) })),
            other => other,
        }
    }

    /// The size, if known.
    pub fn size(&self) -> Option<usize> {
        match self {
            Body::Whole(bytes) => Some(bytes.as_ref().map_or(0, Bytes::len)),
            _ => None,
        }
    }
}

impl From<Bytes> for Body {
    fn from(bytes: Bytes) -> Body {
        Body::Whole(Some(bytes))
    }
}

impl From<Vec<u8>> for Body {
    fn from(bytes: Vec<u8>) -> Body {
        Body::Whole(Some(bytes.into()))
    }
}

impl http_body::Body for Body {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let frame = |bytes| Some(Ok(Frame::data(bytes)));
        match self.get_mut() {
            Body::Whole(bytes) => Poll::Ready(bytes.take().and_then(frame)),
            Body::Chunks(chunks) => Poll::Ready(chunks.next().and_then(frame)),
            Body::Stream(stream) => stream.as_mut().poll_next(cx).map(|next| next.and_then(frame)),
        }
    }

    fn is_end_stream(&self) -> bool {
        matches!(self, Body::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        self.size().map_or_else(SizeHint::default, |size| SizeHint::with_exact(size as u64))
    }
}

struct ChunksWithGuard<T> {
    chunks: Box<dyn Iterator<Item = Bytes> + Send>,
    guard: Option<T>,
}

impl<T> Iterator for ChunksWithGuard<T> {
    type Item = Bytes;

    fn next(&mut self) -> Option<Bytes> {
        let chunk = self.chunks.next();
        if chunk.is_none() {
            self.guard = None;
        }
        chunk
    }
}

struct Gzip {
    chunks: Box<dyn Iterator<Item = Bytes> + Send>,
    encoder: Option<GzEncoder<Vec<u8>>>,
}

impl Iterator for Gzip {
    type Item = Bytes;

    fn next(&mut self) -> Option<Bytes> {
        let encoder = self.encoder.as_mut()?;
        for chunk in self.chunks.by_ref() {
            // Writing into a Vec cannot fail.
            let _ = encoder.write_all(&chunk);
            if encoder.get_ref().len() > 32 << 10 {
                return Some(std::mem::take(encoder.get_mut()).into());
            }
        }
        self.encoder.take().and_then(|encoder| encoder.finish().ok()).map(Bytes::from)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read as _;

    use super::*;

    #[test]
    fn gzip_chunks_decode_to_the_same_bytes() {
        let chunks: Vec<Bytes> =
            (0..500).map(|i| Bytes::from(format!("{i} and some text ").repeat(40))).collect();
        let expected: Vec<u8> = chunks.concat();
        let Body::Chunks(compressed) = Body::Chunks(Box::new(chunks.into_iter())).gzip() else {
            unreachable!()
        };
        let compressed: Vec<u8> = compressed.collect::<Vec<_>>().concat();
        let mut output = Vec::new();
        flate2::read::GzDecoder::new(&compressed[..]).read_to_end(&mut output).unwrap();
        assert_eq!(output, expected);
    }
}
