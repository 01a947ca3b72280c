//! What skiff and a pod's supervisor say to each other: four bytes of length, then JSON. Descriptors come with the first
//! byte of a message.

use serde::{Deserialize, Serialize};

use super::spec::Sandbox;

/// The name of the socket in the directory of a pod.
pub const SOCKET: &str = "socket";
const MAX_MESSAGE_BYTES: usize = 4 << 20;

/// What skiff asks for. Each question has a connection of its own, which ends when there is no more to say.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum SupervisorRequest {
    /// Tells what there is, and what changes, for as long as the connection lasts.
    Watch,
    /// Starts a container that is described in its directory.
    Start {
        container: String,
    },
    Signal {
        container: String,
        signal: i32,
    },
    /// Runs a command with the descriptors that come along; they are given in the order stdin, stdout, stderr. With a
    /// terminal there are none: the answer brings one.
    Exec {
        container: String,
        command: Vec<String>,
        tty: bool,
        streams: StreamSet,
    },
    /// Ties descriptors to a container's own streams.
    Attach {
        container: String,
        streams: StreamSet,
    },
    /// Says how large the terminal of an attached container is.
    Resize {
        container: String,
        rows: u16,
        columns: u16,
    },
    /// A socket in the pod's network.
    Socket {
        ipv6: bool,
    },
    /// Begins a new log file.
    Reopen {
        container: String,
    },
    /// Nobody will ask for this container any more.
    Forget {
        container: String,
    },
    /// Sets what the pod wants set of the kernel, once CNI's programs have made its network: what they set by themselves
    /// does not count then, and its link is there.
    Set {
        pod: Sandbox,
    },
    /// Ends everything.
    Stop,
}

/// Which descriptors come along.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamSet {
    pub stdin: bool,
    pub stdout: bool,
    pub stderr: bool,
}

impl StreamSet {
    pub fn count(self) -> usize {
        [self.stdin, self.stdout, self.stderr].into_iter().filter(|one| *one).count()
    }
}

/// What the supervisor says.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum SupervisorResponse {
    Done,
    Failed {
        message: String,
    },
    /// Of one container, when asked to watch.
    Status {
        container: String,
        status: RunStatus,
    },
    /// All there is has been told; from now on only changes.
    Known,
    /// How a command ended.
    Exited {
        code: i32,
    },
}

/// How a container is.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunStatus {
    /// Nanoseconds since 1970; zero for never.
    pub started: i64,
    pub finished: i64,
    pub exit_code: i32,
    /// Ended for want of memory.
    pub out_of_memory: bool,
    /// Why it never ran.
    pub failure: Option<String>,
    pub pid: i32,
    /// Who it began as; none of a container that an older supervisor has started.
    #[serde(default)]
    pub user: Option<User>,
}

/// A user by numbers, as they are in the container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    /// The main group is one of them.
    pub groups: Vec<u32>,
}

/// A message with its length.
pub fn encode_message(message: &impl Serialize) -> Vec<u8> {
    let body = serde_json::to_vec(message).expect("messages have only strings and numbers");
    let length = u32::try_from(body.len()).expect("messages are short");
    [&length.to_le_bytes()[..], &body].concat()
}

/// Takes the first message off what was received, once it is all there.
pub fn decode_message<T: serde::de::DeserializeOwned>(
    received: &mut Vec<u8>,
) -> Result<Option<T>, InvalidMessage> {
    let Some(length) = received.first_chunk::<4>() else { return Ok(None) };
    let length = u32::from_le_bytes(*length) as usize;
    if length > MAX_MESSAGE_BYTES {
        return Err(InvalidMessage);
    }
    if received.len() < 4 + length {
        return Ok(None);
    }
    let message = serde_json::from_slice(&received[4..4 + length]).map_err(|_| InvalidMessage)?;
    received.drain(..4 + length);
    Ok(Some(message))
}

/// The other side is not what it should be.
#[derive(Debug, thiserror::Error)]
#[error("a message that cannot be understood")]
pub struct InvalidMessage;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decode_messages_byte_by_byte() {
        let bytes = [
            encode_message(&SupervisorResponse::Done),
            encode_message(&SupervisorResponse::Exited { code: 3 }),
        ]
        .concat();
        let mut received = Vec::new();
        let mut decoded = Vec::new();
        for byte in bytes {
            received.push(byte);
            decoded.extend(decode_message::<SupervisorResponse>(&mut received).unwrap());
        }
        assert_eq!(decoded, [SupervisorResponse::Done, SupervisorResponse::Exited { code: 3 }]);
        assert!(decode_message::<SupervisorResponse>(&mut vec![255; 8]).is_err());
        assert!(decode_message::<SupervisorResponse>(&mut vec![1, 0, 0, 0, b'x']).is_err());
    }
}
