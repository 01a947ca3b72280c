//! A scheduler extender: an external program that the scheduler calls over HTTP.
//!
//! This one filters out nodes whose names end in an odd digit and prefers short names. Extenders can be
//! written in any language; requests and responses are JSON. The scheduler is configured with:
//!
//! ```yaml
//! apiVersion: kubescheduler.config.k8s.io/v1
//! kind: KubeSchedulerConfiguration
//! extenders:
//! - urlPrefix: http://127.0.0.1:8888
//!   filterVerb: filter
//!   prioritizeVerb: prioritize
//!   weight: 2
//!   nodeCacheCapable: true
//! ```
//! ```text
//! cargo run -p scheduler --example extender -- 127.0.0.1:8888
//! skiff scheduler --kubeconfig F --config the-file-above
//! ```

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{TcpListener, TcpStream};

use serde_json::{Value, json};

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let address = std::env::args().nth(1).unwrap_or_else(|| "127.0.0.1:8888".to_owned());
    let listener = TcpListener::bind(&address)?;
    println!("listening on {address}");
    for stream in listener.incoming() {
        if let Err(error) = stream.map_err(Into::into).and_then(answer) {
            eprintln!("{error}");
        }
    }
    Ok(())
}

/// Handles one request with the minimum of HTTP that the example needs.
fn answer(mut stream: TcpStream) -> Result<(), Box<dyn std::error::Error>> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut first = String::new();
    reader.read_line(&mut first)?;
    let mut length = 0;
    loop {
        let mut line = String::new();
        if reader.read_line(&mut line)? == 0 || line.trim().is_empty() {
            break;
        }
        if let Some((name, value)) = line.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse()?;
        }
    }
    let mut body = vec![0; length];
    reader.read_exact(&mut body)?;
    let request: Value = serde_json::from_slice(&body)?;
    let names: Vec<&str> =
        request["NodeNames"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
    let reply = match first.split_whitespace().nth(1) {
        Some("/filter") => filter(&names),
        Some("/prioritize") => prioritize(&names),
        _ => json!({"Error": "unknown path"}),
    };
    let reply = reply.to_string();
    write!(
        stream,
        "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\nConnection: close\r\n\r\n{reply}",
        reply.len()
    )?;
    Ok(())
}

/// Returns the nodes that pass, and the reason for each that does not.
fn filter(names: &[&str]) -> Value {
    let odd = |name: &&str| name.ends_with(['1', '3', '5', '7', '9']);
    let failed: serde_json::Map<String, Value> = names
        .iter()
        .filter(|name| odd(name))
        .map(|name| ((*name).to_owned(), "node(s) were odd".into()))
        .collect();
    let passed: Vec<&&str> = names.iter().filter(|name| !odd(name)).collect();
    json!({"NodeNames": passed, "FailedNodes": failed, "Error": ""})
}

/// Returns scores from 0 to 10; the scheduler multiplies them by the configured weight.
fn prioritize(names: &[&str]) -> Value {
    names.iter().map(|name| json!({"Host": name, "Score": 10_usize.saturating_sub(name.len() / 4)})).collect()
}
