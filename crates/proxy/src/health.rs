//! Serves the health check node port of Services with `externalTrafficPolicy: Local`, where load
//! balancers find out whether this node has ready endpoints.
//!
//! Upstream: `pkg/proxy/healthcheck`.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed};

use http_body_util::Full;
use hyper::body::Bytes;
use hyper::service::service_fn;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use reconcile::Key;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

use crate::plan::HealthCheck;

/// The health check ports that are being served.
#[derive(Default)]
pub struct HealthPorts {
    served: HashMap<Key, ServedPort>,
    /// Whether the last sync of the table succeeded.
    healthy: Arc<AtomicBool>,
}

struct ServedPort {
    port: u16,
    endpoints: Arc<AtomicUsize>,
    task: JoinHandle<()>,
}

impl HealthPorts {
    pub fn set_healthy(&self, healthy: bool) {
        self.healthy.store(healthy, Relaxed);
    }

    /// Serves the health check port of a Service and closes its previous port.
    pub async fn set(&mut self, service: &Key, health_check: Option<&HealthCheck>) {
        let known = self.served.get(service);
        match (known, health_check) {
            (Some(known), Some(health_check)) if known.port == health_check.port => {
                known.endpoints.store(health_check.endpoints, Relaxed);
                return;
            }
            (Some(known), _) => {
                known.task.abort();
                self.served.remove(service);
            }
            (None, _) => {}
        }
        let Some(health_check) = health_check else { return };
        match listen(health_check.port).await {
            Ok(listener) => {
                let endpoints = Arc::new(AtomicUsize::new(health_check.endpoints));
                let answer = HealthResponse {
                    service: service.clone(),
                    endpoints: endpoints.clone(),
                    healthy: self.healthy.clone(),
                };
                let task = tokio::spawn(serve(listener, answer));
                self.served.insert(service.clone(), ServedPort { port: health_check.port, endpoints, task });
            }
            Err(error) => {
                tracing::warn!(%error, %service, port = health_check.port, "failed to listen on health check node port")
            }
        }
    }
}

impl Drop for HealthPorts {
    fn drop(&mut self) {
        self.served.values().for_each(|served| served.task.abort());
    }
}

/// Listens on all addresses; on those of both families if IPv6 is available.
async fn listen(port: u16) -> std::io::Result<TcpListener> {
    match TcpListener::bind(SocketAddr::from((Ipv6Addr::UNSPECIFIED, port))).await {
        Ok(listener) => Ok(listener),
        Err(_) => TcpListener::bind(SocketAddr::from((Ipv4Addr::UNSPECIFIED, port))).await,
    }
}

#[derive(Clone)]
struct HealthResponse {
    service: Key,
    endpoints: Arc<AtomicUsize>,
    healthy: Arc<AtomicBool>,
}

async fn serve(listener: TcpListener, answer: HealthResponse) {
    loop {
        let Ok((stream, _)) = listener.accept().await else {
            tokio::task::yield_now().await;
            continue;
        };
        let answer = answer.clone();
        tokio::spawn(async move {
            let service = service_fn(move |_: Request<_>| {
                let reply = answer.reply();
                async move { Ok::<_, Infallible>(reply) }
            });
            // Errors from clients that disconnect are irrelevant.
            let _ = hyper::server::conn::http1::Builder::new()
                .keep_alive(false)
                .serve_connection(TokioIo::new(stream), service)
                .await;
        });
    }
}

impl HealthResponse {
    fn reply(&self) -> Response<Full<Bytes>> {
        let (endpoints, healthy) = (self.endpoints.load(Relaxed), self.healthy.load(Relaxed));
        let status = if endpoints > 0 && healthy { StatusCode::OK } else { StatusCode::SERVICE_UNAVAILABLE };
        let Key { namespace, name, .. } = &self.service;
        let body = format!(
            "{{\n\t\"service\": {{\n\t\t\"namespace\": \"{namespace}\",\n\t\t\"name\": \"{name}\"\n\t}},\n\t\
             \"localEndpoints\": {endpoints},\n\t\"serviceProxyHealthy\": {healthy}\n}}\n"
        );
        let reply = Response::builder()
            .status(status)
            .header("Content-Type", "application/json")
            .header("X-Content-Type-Options", "nosniff")
            .header("X-Load-Balancing-Endpoint-Weight", endpoints.to_string());
        reply.body(Full::new(Bytes::from(body))).expect("these headers are valid")
    }
}
