//! The protocol between skiff and the supervisor of a pod: messages of JSON with a length prefix of
//! four bytes. Descriptors are sent with the first byte of a message.

use serde::{Deserialize, Serialize};

use super::spec::Sandbox;

/// The name of the socket in the pod's directory.
pub const SOCKET: &str = "socket";
const MAX_MESSAGE_BYTES: usize = 4 << 20;

/// A request of skiff. Each has a connection of its own, which is closed when the request is done.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum SupervisorRequest {
    /// Sends the status of all containers and of every change while the connection is open.
    Watch,
    /// Starts the container whose spec is in its directory.
    Start {
        container: String,
    },
    Signal {
        container: String,
        signal: i32,
    },
    /// Runs a command. Its streams are the descriptors sent along, in the order stdin, stdout, stderr.
    /// With a terminal there are none; the response has the terminal's descriptor.
    Exec {
        container: String,
        command: Vec<String>,
        tty: bool,
        streams: StreamSet,
    },
    /// Connects descriptors to the streams of the container.
    Attach {
        container: String,
        streams: StreamSet,
    },
    /// Sets the size of the terminal of an attached container.
    Resize {
        container: String,
        rows: u16,
        columns: u16,
    },
    /// Returns a socket in the pod's network namespace.
    Socket {
        ipv6: bool,
    },
    /// Reopens the log file, after a rotation.
    Reopen {
        container: String,
    },
    /// The container is being removed; drops its state.
    Forget {
        container: String,
    },
    /// Applies the pod's sysctls after CNI plugins have set up its network. Its interface exists then,
    /// and its settings override those of the plugins.
    Set {
        pod: Sandbox,
    },
    /// Stops the pod and exits.
    Stop,
}

/// Which streams have descriptors.
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

/// A response of the supervisor.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum SupervisorResponse {
    Done,
    Failed {
        message: String,
    },
    /// The status of a container, for `Watch`.
    Status {
        container: String,
        status: RunStatus,
    },
    /// All current statuses have been sent; only changes follow.
    Known,
    /// The exit code of a command.
    Exited {
        code: i32,
    },
}

/// The status of a container.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RunStatus {
    /// Nanoseconds since the Unix epoch; zero for never.
    pub started: i64,
    pub finished: i64,
    pub exit_code: i32,
    /// Killed by the OOM killer.
    pub out_of_memory: bool,
    /// Why the start failed.
    pub failure: Option<String>,
    pub pid: i32,
    /// The user it was started as; `None` if a supervisor of an older version has started it.
    #[serde(default)]
    pub user: Option<User>,
}

/// Numeric user and groups, in the user namespace of the container.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct User {
    pub uid: u32,
    pub gid: u32,
    /// Includes the primary group.
    pub groups: Vec<u32>,
}

/// Encodes a message with its length.
pub fn encode_message(message: &impl Serialize) -> Vec<u8> {
    let body = serde_json::to_vec(message).expect("messages have only strings and numbers");
    let length = u32::try_from(body.len()).expect("messages are short");
    [&length.to_le_bytes()[..], &body].concat()
}

/// Decodes the first message of the received bytes, if it is complete.
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

/// A message that is too large or no valid JSON. The connection is closed.
#[derive(Debug, thiserror::Error)]
#[error("invalid message")]
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
