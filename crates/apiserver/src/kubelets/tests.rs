use expect_test::{Expect, expect};
use serde_json::json;

use super::*;
use crate::request::Query;

#[track_caller]
fn check(found: Result<String, Status>, expected: Expect) {
    expected.assert_eq(&found.unwrap_or_else(|status| format!("{} {}", status.code, status.message)));
}

#[test]
fn container_must_be_one_of_the_pod_containers() {
    let one = json!({"metadata": {"name": "web"}, "spec": {"containers": [{"name": "main"}]}});
    let two = json!({"metadata": {"name": "web"}, "spec": {
        "initContainers": [{"name": "setup"}], "containers": [{"name": "a"}, {"name": "b"}]}});
    check(select_container("", &one), expect!["main"]);
    check(select_container("main", &one), expect!["main"]);
    check(select_container("x", &one), expect!["400 container x is not valid for pod web"]);
    check(select_container("../../etc", &one), expect!["400 container ../../etc is not valid for pod web"]);
    check(select_container("setup", &two), expect!["setup"]);
    check(
        select_container("", &two),
        expect!["400 a container name must be specified for pod web, choose one of: [setup a b]"],
    );
}

#[test]
fn log_options_are_validated_and_converted() {
    let check = |query: &str, expected| check(options::log_query(&Query::parse(query), "web"), expected);
    check("", expect![""]);
    check(
        "follow=true&previous=1&timestamps=false&tailLines=3&container=x",
        expect!["?follow=true&previous=true&tailLines=3"],
    );
    check("sinceTime=2026-01-01T00:00:00%2B01:00", expect!["?sinceTime=2025-12-31T23%3A00%3A00Z"]);
    check(
        "tailLines=-1&limitBytes=0",
        expect![[r#"
        422 PodLogOptions "web" is invalid: [tailLines: Invalid value: -1: must be greater than or equal to 0, limitBytes: Invalid value: 0: must be greater than 0]"#]],
    );
    check(
        "sinceSeconds=1&sinceTime=2026-01-01T00:00:00Z",
        expect![[r#"
        422 PodLogOptions "web" is invalid: <nil>: Forbidden: at most one of `sinceTime` or `sinceSeconds` may be specified"#]],
    );
    check("tailLines=x", expect![[r#"400 strconv.ParseInt: parsing "x": invalid syntax"#]]);
}

#[test]
fn stream_options_are_validated_and_converted() {
    let check =
        |kind: StreamSubresource, query: &str, expected| check(kind.query(&Query::parse(query)), expected);
    check(
        StreamSubresource::Exec,
        "stdin=true&stdout=true&stderr=true&command=sh&command=-c&command=echo+a%26b",
        expect!["?input=1&output=1&error=1&command=sh&command=-c&command=echo%20a%26b"],
    );
    check(StreamSubresource::Attach, "stdin=true&tty=true&command=no", expect!["?input=1&output=1&tty=1"]);
    check(StreamSubresource::PortForward, "ports=80,81&ports=82", expect!["?port=80%2C81%2C82"]);
    check(StreamSubresource::PortForward, "ports=0", expect![[r#"400 invalid port "0""#]]);
    check(StreamSubresource::PortForward, "", expect![""]);
}

#[test]
fn kubelet_address_is_read_from_node_status() {
    let node = json!({"status": {
        "addresses": [{"type": "Hostname", "address": "here"}, {"type": "InternalIP", "address": "fd00::1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": 10251}}}});
    assert_eq!(UpstreamAddr::from_node(&node).expect("a place").host_port(), "[fd00::1]:10251");
    check(
        UpstreamAddr::from_node(
            &json!({"metadata": {"name": "n", "labels": {"simulate.skiff/node": "true"}}}),
        )
        .map(|addr| addr.host_port()),
        expect!["400 node n is simulated: it has no kubelet, so its pods have no logs or processes"],
    );
    check(
        UpstreamAddr::from_node(&json!({})).map(|addr| addr.host_port()),
        expect!["500 no preferred addresses found; known addresses: []"],
    );
}

#[test]
fn websocket_protocol_is_negotiated_per_subresource() {
    let check = |upgrade: &'static str, offered: &'static str, kind: StreamSubresource, expected| {
        let mut headers = http::HeaderMap::new();
        headers.insert("connection", "Upgrade".parse().expect("a header"));
        headers.insert("upgrade", upgrade.parse().expect("a header"));
        headers.insert("sec-websocket-protocol", offered.parse().expect("a header"));
        assert_eq!(websocket::negotiate_protocol(&headers, kind), expected, "{upgrade} {offered}");
    };
    use websocket::WebSocketProtocol;
    check("websocket", "v5.channel.k8s.io", StreamSubresource::Exec, Some(WebSocketProtocol::Channels));
    check(
        "WebSocket",
        "v4.channel.k8s.io, v5.channel.k8s.io",
        StreamSubresource::Attach,
        Some(WebSocketProtocol::Channels),
    );
    check("websocket", "v4.channel.k8s.io", StreamSubresource::Exec, None);
    check(
        "websocket",
        "SPDY/3.1+portforward.k8s.io",
        StreamSubresource::PortForward,
        Some(WebSocketProtocol::Tunnel),
    );
    check("websocket", "v4.channel.k8s.io", StreamSubresource::PortForward, None);
    check("SPDY/3.1", "v5.channel.k8s.io", StreamSubresource::Exec, None);
}
