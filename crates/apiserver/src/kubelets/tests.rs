use expect_test::{Expect, expect};
use serde_json::json;

use super::*;
use crate::request::Query;

#[track_caller]
fn check(found: Result<String, Status>, expected: Expect) {
    expected.assert_eq(&found.unwrap_or_else(|status| format!("{} {}", status.code, status.message)));
}

#[test]
fn the_container_meant_is_one_of_the_pods() {
    let one = json!({"metadata": {"name": "web"}, "spec": {"containers": [{"name": "main"}]}});
    let two = json!({"metadata": {"name": "web"}, "spec": {
        "initContainers": [{"name": "setup"}], "containers": [{"name": "a"}, {"name": "b"}]}});
    check(container("", &one), expect!["main"]);
    check(container("main", &one), expect!["main"]);
    check(container("x", &one), expect!["400 container x is not valid for pod web"]);
    check(container("../../etc", &one), expect!["400 container ../../etc is not valid for pod web"]);
    check(container("setup", &two), expect!["setup"]);
    check(
        container("", &two),
        expect!["400 a container name must be specified for pod web, choose one of: [setup a b]"],
    );
}

#[test]
fn the_options_of_logs() {
    let check = |query: &str, expected| check(options::log(&Query::parse(query), "web"), expected);
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
fn the_options_of_streams() {
    let check = |what: Stream, query: &str, expected| check(what.query(&Query::parse(query)), expected);
    check(
        Stream::Exec,
        "stdin=true&stdout=true&stderr=true&command=sh&command=-c&command=echo+a%26b",
        expect!["?input=1&output=1&error=1&command=sh&command=-c&command=echo%20a%26b"],
    );
    check(Stream::Attach, "stdin=true&tty=true&command=no", expect!["?input=1&output=1&tty=1"]);
    check(Stream::PortForward, "ports=80,81&ports=82", expect!["?port=80%2C81%2C82"]);
    check(Stream::PortForward, "ports=0", expect![[r#"400 "0" is no port"#]]);
    check(Stream::PortForward, "", expect![""]);
}

#[test]
fn where_kubelets_are() {
    let node = json!({"status": {
        "addresses": [{"type": "Hostname", "address": "here"}, {"type": "InternalIP", "address": "fd00::1"}],
        "daemonEndpoints": {"kubeletEndpoint": {"Port": 10251}}}});
    assert_eq!(Place::of(&node).expect("a place").shown(), "[fd00::1]:10251");
    check(
        Place::of(&json!({"metadata": {"name": "n", "labels": {"simulate.skiff/node": "true"}}}))
            .map(|place| place.shown()),
        expect!["400 node n is simulated: it has no kubelet, and its pods have neither logs nor processes"],
    );
    check(
        Place::of(&json!({})).map(|place| place.shown()),
        expect!["500 no preferred addresses found; known addresses: []"],
    );
}

#[test]
fn what_is_spoken_here_over_websocket() {
    let check = |upgrade: &'static str, offered: &'static str, what: Stream, expected| {
        let mut headers = http::HeaderMap::new();
        headers.insert("connection", "Upgrade".parse().expect("a header"));
        headers.insert("upgrade", upgrade.parse().expect("a header"));
        headers.insert("sec-websocket-protocol", offered.parse().expect("a header"));
        assert_eq!(websocket::chosen(&headers, what), expected, "{upgrade} {offered}");
    };
    use websocket::Spoken;
    check("websocket", "v5.channel.k8s.io", Stream::Exec, Some(Spoken::Channels));
    check("WebSocket", "v4.channel.k8s.io, v5.channel.k8s.io", Stream::Attach, Some(Spoken::Channels));
    check("websocket", "v4.channel.k8s.io", Stream::Exec, None);
    check("websocket", "SPDY/3.1+portforward.k8s.io", Stream::PortForward, Some(Spoken::Tunnel));
    check("websocket", "v4.channel.k8s.io", Stream::PortForward, None);
    check("SPDY/3.1", "v5.channel.k8s.io", Stream::Exec, None);
}
