//! gRPC calls with hand-written `prost` messages instead of generated code.

use futures_util::Stream;
use http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Request, Status, Streaming};
use tonic_prost::ProstCodec;

/// Sends a unary request. `path` is a method such as `/etcdserverpb.KV/Range`.
pub async fn unary<Q, A>(
    channel: &Channel,
    path: &'static str,
    request: Request<Q>,
    max_message_bytes: usize,
) -> Result<A, Status>
where
    Q: prost::Message + Send + Sync + 'static,
    A: prost::Message + Default + Send + Sync + 'static,
{
    let mut client = tonic::client::Grpc::new(channel.clone()).max_decoding_message_size(max_message_bytes);
    client.ready().await.map_err(unreachable)?;
    let response = client.unary(request, PathAndQuery::from_static(path), ProstCodec::default()).await?;
    Ok(response.into_inner())
}

/// Opens a bidirectional stream.
pub async fn streaming<Q, A>(
    channel: &Channel,
    path: &'static str,
    requests: Request<impl Stream<Item = Q> + Send + 'static>,
    max_message_bytes: usize,
) -> Result<Streaming<A>, Status>
where
    Q: prost::Message + Send + Sync + 'static,
    A: prost::Message + Default + Send + Sync + 'static,
{
    let mut client = tonic::client::Grpc::new(channel.clone()).max_decoding_message_size(max_message_bytes);
    client.ready().await.map_err(unreachable)?;
    let response = client.streaming(requests, PathAndQuery::from_static(path), ProstCodec::default()).await?;
    Ok(response.into_inner())
}

fn unreachable(error: tonic::transport::Error) -> Status {
    Status::unavailable(error.to_string())
}
