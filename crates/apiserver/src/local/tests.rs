use serde_json::{Value, json};

use super::*;
use crate::tests::TestServer;

/// `+name` for existing objects, `-name` for deleted ones.
fn describe(news: WatchEvent) -> Vec<String> {
    let name = |raw: &RawObject| {
        let value: Value = serde_json::from_slice(&raw.json()).expect("JSON");
        value["metadata"]["name"].as_str().expect("a name").to_owned()
    };
    match news {
        WatchEvent::Replace { objects, .. } => objects.iter().map(|raw| format!("+{}", name(raw))).collect(),
        WatchEvent::Changes { changes, .. } => {
            let sign = |change: &WatchChange| if change.deleted { '-' } else { '+' };
            changes.iter().map(|change| format!("{}{}", sign(change), name(&change.object))).collect()
        }
    }
}

/// The next event that is not empty.
async fn next(feed: &mut Box<dyn Watch>) -> Vec<String> {
    loop {
        let names = describe(feed.next().await.expect("news"));
        if !names.is_empty() {
            return names;
        }
    }
}

#[tokio::test]
async fn watch_returns_only_selected_objects() {
    let test_server = TestServer::start().await;
    let create = async |name: &str, color: &str| {
        let object = json!({"metadata": {"name": name, "labels": {"color": color}}});
        test_server.send("POST /api/v1/namespaces/default/configmaps", object).await;
    };
    create("a", "red").await;
    create("b", "blue").await;
    let local = LocalConnection::new(test_server.server.clone());
    let mut by_label = local.watch("/api/v1/configmaps?labelSelector=color%3Dred").await.expect("a feed");
    let mut by_name =
        local.watch("/api/v1/configmaps?fieldSelector=metadata.name%3Db").await.expect("a feed");
    assert_eq!(next(&mut by_label).await, ["+a"]);
    assert_eq!(next(&mut by_name).await, ["+b"]);
    create("c", "blue").await;
    create("d", "red").await;
    assert_eq!(next(&mut by_label).await, ["+d"]);
    let updated = json!({"metadata": {"name": "d", "labels": {"color": "blue"}}});
    test_server.send("PUT /api/v1/namespaces/default/configmaps/d", updated).await;
    assert_eq!(next(&mut by_label).await, ["-d"]);
    test_server.call("DELETE /api/v1/namespaces/default/configmaps/a", "", "").await;
    test_server.call("DELETE /api/v1/namespaces/default/configmaps/b", "", "").await;
    assert_eq!(next(&mut by_label).await, ["-a"]);
    assert_eq!(next(&mut by_name).await, ["-b"]);
    assert!(
        local.watch("/api/v1/configmaps?fieldSelector=data.x%3Dy").await.is_err(),
        "no field to select by"
    );
}
