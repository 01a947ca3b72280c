//! A connection that yields to others: it limits the bytes written per poll.
//!
//! A long list is written as fast as the client reads, and encrypting megabytes takes milliseconds.
//! With a few such lists, a small request would wait for all of them at each of its steps.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// The bytes that are written before the task yields.
const MAX_BYTES_PER_POLL: usize = 64 << 10;

pub struct WriteBudget<S> {
    stream: S,
    /// Bytes written since the last yield.
    sent: usize,
}

impl<S> WriteBudget<S> {
    pub fn new(stream: S) -> WriteBudget<S> {
        WriteBudget { stream, sent: 0 }
    }
}

impl<S: AsyncWrite + Unpin> WriteBudget<S> {
    fn send(
        &mut self,
        cx: &mut Context<'_>,
        write: impl FnOnce(Pin<&mut S>, &mut Context<'_>) -> Poll<io::Result<usize>>,
    ) -> Poll<io::Result<usize>> {
        if self.sent >= MAX_BYTES_PER_POLL {
            self.sent = 0;
            // Reschedules the task at the end of the run queue.
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let sent = ready!(write(Pin::new(&mut self.stream), cx))?;
        self.sent += sent;
        Poll::Ready(Ok(sent))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for WriteBudget<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.send(cx, |stream, cx| stream.poll_write(cx, bytes))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.send(cx, |stream, cx| stream.poll_write_vectored(cx, parts))
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for WriteBudget<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        into: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, into)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicUsize, Ordering};
    use std::task::Wake;

    use tokio::io::AsyncReadExt as _;

    use super::*;

    #[derive(Default)]
    struct Woken(AtomicUsize);

    impl Wake for Woken {
        fn wake(self: Arc<Woken>) {
            self.0.fetch_add(1, Ordering::Relaxed);
        }
    }

    #[tokio::test]
    async fn long_write_is_pending_after_the_budget() {
        let (writer, mut reader) = tokio::io::duplex(32 * MAX_BYTES_PER_POLL);
        let mut writer = WriteBudget::new(writer);
        let woken = Arc::new(Woken::default());
        let waker = woken.clone().into();
        let mut cx = Context::from_waker(&waker);
        let half = [7; MAX_BYTES_PER_POLL / 2];
        for round in 1..=4 {
            for _ in 0..2 {
                assert!(Pin::new(&mut writer).poll_write(&mut cx, &half).is_ready());
            }
            assert!(
                Pin::new(&mut writer).poll_write(&mut cx, &half).is_pending(),
                "a write beyond the budget is pending"
            );
            assert_eq!(woken.0.load(Ordering::Relaxed), round, "the task is woken again");
        }
        drop(writer);
        let mut read = Vec::new();
        reader.read_to_end(&mut read).await.expect("it can be read");
        assert_eq!(read.len(), 4 * MAX_BYTES_PER_POLL);
    }
}
