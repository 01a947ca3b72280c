//! What a supervisor waits for, and what that tells it.

use std::os::fd::AsFd;

use rustix::event::{PollFd, PollFlags};

use super::container::Running;
use super::log::Stream;

/// What the kernel has news of.
#[derive(Clone, Debug)]
pub enum News {
    Caller,
    Connection(u64),
    Starting(String),
    Output(String, Stream),
    Stdin(String),
    ListenerIn(String, usize),
    ListenerOut(String, usize, Stream),
    Ended(String),
    Command(u64),
    /// Something in the pod's directory is gone.
    Removal,
}

/// What to wait for.
pub struct Watched<'a> {
    pub news: Vec<News>,
    pub fds: Vec<PollFd<'a>>,
}

impl<'a> Watched<'a> {
    pub fn add(&mut self, news: News, fd: &'a impl AsFd, flags: PollFlags) {
        self.news.push(news);
        self.fds.push(PollFd::new(fd, flags));
    }

    /// Everything of one container that something may come from.
    pub fn container(&mut self, id: &str, running: &'a Running) {
        let id = || id.to_owned();
        let has_input = !running.to_stdin.is_empty();
        if let Some(starting) = &running.starting {
            self.add(News::Starting(id()), &starting.channel, PollFlags::IN);
        }
        if let Some(terminal) = &running.terminal {
            self.add(News::Output(id(), Stream::Out), terminal, PollFlags::IN);
        }
        if let Some(stdin) = running.terminal.as_ref().or(running.stdin.as_ref()).filter(|_| has_input) {
            self.add(News::Stdin(id()), stdin, PollFlags::OUT);
        }
        for stream in [Stream::Out, Stream::Err] {
            if let Some(output) = &running.output[stream as usize] {
                self.add(News::Output(id(), stream), output, PollFlags::IN);
            }
        }
        for (at, listener) in running.listeners.iter().enumerate() {
            // One that types faster than the container reads has to wait.
            if let Some(stdin) = listener.stdin.as_ref().filter(|_| !has_input) {
                self.add(News::ListenerIn(id(), at), stdin, PollFlags::IN);
            }
            for stream in [Stream::Out, Stream::Err] {
                if let Some((file, pending)) = &listener.output[stream as usize]
                    && !pending.is_empty()
                {
                    self.add(News::ListenerOut(id(), at, stream), file, PollFlags::OUT);
                }
            }
        }
        if let Some(child) = &running.child {
            self.add(News::Ended(id()), child, PollFlags::IN);
        }
    }
}
