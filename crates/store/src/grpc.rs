//! Calls of gRPC whose messages are structs with their field numbers.

use futures_util::Stream;
use http::uri::PathAndQuery;
use tonic::transport::Channel;
use tonic::{Request, Status, Streaming};
use tonic_prost::ProstCodec;

/// Asks once; `path` is that of a method, such as `/etcdserverpb.KV/Range`.
pub async fn ask<Q, A>(
    channel: &Channel,
    path: &'static str,
    request: Request<Q>,
    largest: usize,
) -> Result<A, Status>
where
    Q: prost::Message + Send + Sync + 'static,
    A: prost::Message + Default + Send + Sync + 'static,
{
    let mut client = tonic::client::Grpc::new(channel.clone()).max_decoding_message_size(largest);
    client.ready().await.map_err(unreachable)?;
    let answer = client.unary(request, PathAndQuery::from_static(path), ProstCodec::default()).await?;
    Ok(answer.into_inner())
}

/// Both sides go on talking.
pub async fn talk<Q, A>(
    channel: &Channel,
    path: &'static str,
    requests: Request<impl Stream<Item = Q> + Send + 'static>,
    largest: usize,
) -> Result<Streaming<A>, Status>
where
    Q: prost::Message + Send + Sync + 'static,
    A: prost::Message + Default + Send + Sync + 'static,
{
    let mut client = tonic::client::Grpc::new(channel.clone()).max_decoding_message_size(largest);
    client.ready().await.map_err(unreachable)?;
    let answer = client.streaming(requests, PathAndQuery::from_static(path), ProstCodec::default()).await?;
    Ok(answer.into_inner())
}

fn unreachable(error: tonic::transport::Error) -> Status {
    Status::unavailable(error.to_string())
}
