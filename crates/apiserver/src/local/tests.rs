use serde_json::{Value, json};

use super::*;
use crate::tests::Rig;

/// `+name` for what is there, `-name` for what is gone.
fn told(news: News) -> Vec<String> {
    let name = |raw: &Raw| {
        let value: Value = serde_json::from_slice(&raw.json()).expect("JSON");
        value["metadata"]["name"].as_str().expect("a name").to_owned()
    };
    match news {
        News::Everything { objects, .. } => objects.iter().map(|raw| format!("+{}", name(raw))).collect(),
        News::Changes { changes, .. } => {
            let sign = |change: &Change| if change.deleted { '-' } else { '+' };
            changes.iter().map(|change| format!("{}{}", sign(change), name(&change.object))).collect()
        }
    }
}

/// What is told until something is.
async fn next(feed: &mut Box<dyn Feed>) -> Vec<String> {
    loop {
        let told = told(feed.next().await.expect("news"));
        if !told.is_empty() {
            return told;
        }
    }
}

#[tokio::test]
async fn only_what_is_selected_is_told() {
    let rig = Rig::start().await;
    let make = async |name: &str, color: &str| {
        let object = json!({"metadata": {"name": name, "labels": {"color": color}}});
        rig.send("POST /api/v1/namespaces/default/configmaps", object).await;
    };
    make("a", "red").await;
    make("b", "blue").await;
    let local = Local::new(rig.server.clone());
    let mut reds = local.follow("/api/v1/configmaps?labelSelector=color%3Dred").await.expect("a feed");
    let mut named = local.follow("/api/v1/configmaps?fieldSelector=metadata.name%3Db").await.expect("a feed");
    assert_eq!(next(&mut reds).await, ["+a"]);
    assert_eq!(next(&mut named).await, ["+b"]);
    make("c", "blue").await;
    make("d", "red").await;
    assert_eq!(next(&mut reds).await, ["+d"]);
    let paint = json!({"metadata": {"name": "d", "labels": {"color": "blue"}}});
    rig.send("PUT /api/v1/namespaces/default/configmaps/d", paint).await;
    assert_eq!(next(&mut reds).await, ["-d"]);
    rig.call("DELETE /api/v1/namespaces/default/configmaps/a", "", "").await;
    rig.call("DELETE /api/v1/namespaces/default/configmaps/b", "", "").await;
    assert_eq!(next(&mut reds).await, ["-a"]);
    assert_eq!(next(&mut named).await, ["-b"]);
    assert!(
        local.follow("/api/v1/configmaps?fieldSelector=data.x%3Dy").await.is_err(),
        "no field to select by"
    );
}
