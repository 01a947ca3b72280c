//! A gRPC client for Unix sockets. It connects at the first call, and again after the connection was
//! lost.
//!
//! Messages are encoded outside the transport code, so that the latter is compiled once instead of once
//! for each message type.

use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::{Buf as _, BufMut as _, Bytes};
use http::uri::PathAndQuery;
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::transport::{Channel, Endpoint, Uri};
use tonic::{Code, Status};

/// Responses of a node with many pods exceed the default limit.
const MAX_RESPONSE_BYTES: usize = 16 << 20;

/// A gRPC client for a Unix socket.
#[derive(Clone, Debug)]
pub struct GrpcClient {
    channel: Channel,
    path: PathBuf,
}

/// A gRPC error status.
#[derive(Clone, Debug, thiserror::Error)]
#[error("rpc error: code = {code:?} desc = {message}")]
pub struct RpcError {
    pub code: Code,
    pub message: String,
}

impl From<Status> for RpcError {
    fn from(status: Status) -> RpcError {
        RpcError { code: status.code(), message: status.message().to_owned() }
    }
}

impl GrpcClient {
    /// `path` may have the form `unix:///run/…`.
    pub fn new(path: &str) -> GrpcClient {
        let path = PathBuf::from(path.strip_prefix("unix://").unwrap_or(path));
        let target = path.clone();
        let connect = move |_: Uri| {
            let target = target.clone();
            async move { UnixStream::connect(target).await.map(TokioIo::new) }
        };
        // The address is used only for headers; the connector opens the socket.
        let endpoint = Endpoint::from_static("http://localhost");
        GrpcClient { channel: endpoint.connect_with_connector_lazy(tower::service_fn(connect)), path }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Makes a unary call. `call` is the path of a method, such as `/csi.v1.Node/NodeGetInfo`.
    pub async fn call<Q, A>(&self, call: &'static str, question: &Q, timeout: Duration) -> Result<A, RpcError>
    where
        Q: prost::Message,
        A: prost::Message + Default,
    {
        let answer = self.call_raw(call, question.encode_to_vec().into(), timeout).await?;
        A::decode(answer)
            .map_err(|error| RpcError { code: Code::Internal, message: format!("{call}: {error}") })
    }

    /// Makes a streaming call and passes each message to `on_message`. Returns when the server ends the
    /// stream.
    pub async fn listen<Q>(
        &self,
        call: &'static str,
        question: &Q,
        mut on_message: impl FnMut(Bytes),
    ) -> Result<(), RpcError>
    where
        Q: prost::Message,
    {
        let mut grpc = tonic::client::Grpc::new(self.channel.clone());
        grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
        let question = tonic::Request::new(Bytes::from(question.encode_to_vec()));
        let answer = grpc.server_streaming(question, PathAndQuery::from_static(call), RawCodec).await?;
        let mut responses = answer.into_inner();
        while let Some(answer) = responses.message().await? {
            on_message(answer);
        }
        Ok(())
    }

    async fn call_raw(
        &self,
        call: &'static str,
        question: Bytes,
        timeout: Duration,
    ) -> Result<Bytes, RpcError> {
        let mut grpc =
            tonic::client::Grpc::new(self.channel.clone()).max_decoding_message_size(MAX_RESPONSE_BYTES);
        let response = async {
            grpc.ready().await.map_err(|error| Status::unavailable(error.to_string()))?;
            grpc.unary(tonic::Request::new(question), PathAndQuery::from_static(call), RawCodec).await
        };
        match tokio::time::timeout(timeout, response).await {
            Ok(answer) => Ok(answer?.into_inner()),
            Err(_) => Err(Status::deadline_exceeded(format!("no response within {timeout:?}")).into()),
        }
    }
}

/// Passes encoded messages through.
struct RawCodec;

impl Codec for RawCodec {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = RawCodec;
    type Decoder = RawCodec;

    fn encoder(&mut self) -> RawCodec {
        RawCodec
    }

    fn decoder(&mut self) -> RawCodec {
        RawCodec
    }
}

impl Encoder for RawCodec {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put(item);
        Ok(())
    }
}

impl Decoder for RawCodec {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}
