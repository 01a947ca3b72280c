//! Sends queries to upstream resolvers.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::time::Duration;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpStream, UdpSocket};

use crate::wire::{self, HEADER_BYTES};

/// The timeout for one resolver before the next one is tried.
const UPSTREAM_TIMEOUT: Duration = Duration::from_secs(2);
/// The number of attempts per resolver, because UDP packets may be lost.
const MAX_ROUNDS: usize = 2;

/// Tries the resolvers in order until one responds. `None` if none does.
pub async fn exchange(servers: &[SocketAddr], question: &[u8], over_tcp: bool) -> Option<Vec<u8>> {
    for server in servers.iter().cycle().take(servers.len() * MAX_ROUNDS) {
        let attempt = async {
            match over_tcp {
                true => exchange_tcp(*server, question).await,
                false => exchange_udp(*server, question).await,
            }
        };
        match tokio::time::timeout(UPSTREAM_TIMEOUT, attempt).await {
            Ok(Ok(answer)) => return Some(answer),
            Ok(Err(error)) => tracing::debug!(%error, %server, "upstream DNS query failed"),
            Err(_) => tracing::debug!(%server, "upstream DNS query timed out"),
        }
    }
    None
}

/// Uses a new socket with a random port for each query, which makes spoofed responses harder.
async fn exchange_udp(server: SocketAddr, question: &[u8]) -> io::Result<Vec<u8>> {
    let any: IpAddr =
        if server.is_ipv6() { Ipv6Addr::UNSPECIFIED.into() } else { Ipv4Addr::UNSPECIFIED.into() };
    let socket = UdpSocket::bind((any, 0)).await?;
    socket.connect(server).await?;
    socket.send(question).await?;
    let mut buffer = vec![0; usize::from(u16::MAX)];
    loop {
        let length = socket.recv(&mut buffer).await?;
        let answer = buffer.get(..length).unwrap_or_default();
        if is_answer(question, answer) {
            return Ok(answer.to_vec());
        }
    }
}

async fn exchange_tcp(server: SocketAddr, question: &[u8]) -> io::Result<Vec<u8>> {
    let mut stream = TcpStream::connect(server).await?;
    let length = u16::try_from(question.len()).map_err(io::Error::other)?;
    stream.write_all(&[&length.to_be_bytes()[..], question].concat()).await?;
    let mut answer = vec![0; usize::from(stream.read_u16().await?)];
    stream.read_exact(&mut answer).await?;
    if is_answer(question, &answer) {
        Ok(answer)
    } else {
        Err(io::Error::other("response does not match the query"))
    }
}

/// Whether a message is the response to this query.
fn is_answer(question: &[u8], answer: &[u8]) -> bool {
    let same_id = wire::read_u16(question, 0) == wire::read_u16(answer, 0);
    let is_response = wire::read_u16(answer, 2).is_some_and(|flags| flags & 0x8000 != 0);
    let Ok(query) = wire::parse_query(question) else { return false };
    let answer_question = answer.get(HEADER_BYTES..HEADER_BYTES + query.question.len());
    // A response with an error may omit the question.
    let same_question = answer_question
        .is_some_and(|answer_question| answer_question.eq_ignore_ascii_case(query.question))
        || wire::read_u16(answer, 4) == Some(0);
    same_id && is_response && same_question
}
