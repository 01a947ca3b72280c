//! Response bodies that are sent after the handler returned: ResponseComplete is recorded at their
//! end.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use futures_util::Stream;
use http::Response;

use super::{AuditRecord, Stage};
use crate::body::Body;

/// Wraps the body so that its end is recorded.
pub fn record_response_end(
    response: Response<Body>,
    record: AuditRecord,
    content_type: String,
) -> Response<Body> {
    let collected = record.wants_response().then(Vec::new);
    let end = ResponseRecorder { record, content_type, collected };
    response.map(|body| match body {
        Body::Chunks(chunks) => Body::Chunks(Box::new(RecordedChunks { chunks, end })),
        Body::Stream(stream) => Body::Stream(Box::pin(RecordedStream { stream, _end: end })),
        whole => whole,
    })
}

/// Records on drop: at the end of the body, or when the client disconnects.
struct ResponseRecorder {
    record: AuditRecord,
    content_type: String,
    /// The bytes sent so far, if the level includes the response.
    collected: Option<Vec<u8>>,
}

impl Drop for ResponseRecorder {
    fn drop(&mut self) {
        if let Some(bytes) = self.collected.take() {
            self.record.set_response(&self.content_type, &bytes);
        }
        self.record.enqueue_stage(Stage::ResponseComplete);
    }
}

struct RecordedChunks {
    chunks: Box<dyn Iterator<Item = Bytes> + Send>,
    end: ResponseRecorder,
}

impl Iterator for RecordedChunks {
    type Item = Bytes;

    fn next(&mut self) -> Option<Bytes> {
        let chunk = self.chunks.next()?;
        if let Some(collected) = &mut self.end.collected {
            collected.extend_from_slice(&chunk);
        }
        Some(chunk)
    }
}

struct RecordedStream {
    stream: Pin<Box<dyn Stream<Item = Bytes> + Send>>,
    _end: ResponseRecorder,
}

impl Stream for RecordedStream {
    type Item = Bytes;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Bytes>> {
        self.stream.as_mut().poll_next(cx)
    }
}
