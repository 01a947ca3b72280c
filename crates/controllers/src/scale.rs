//! The size of anything that has one: the `scale` subresource of kinds known only while running.

use http::Method;
use k8s_openapi::api::autoscaling::v1::Scale;
use reconcile::{ApiResource, Client, Error, Key};

/// The kind of this name in a group and version; `None` where the server has none.
pub async fn find_kind(client: &Client, api_version: &str, kind: &str) -> Result<Option<ApiResource>, Error> {
    match client.resources_for_group_version(api_version).await {
        Ok(kinds) => Ok(kinds.into_iter().find(|served| served.kind == kind)),
        Err(error) if error.is_not_found() => Ok(None),
        Err(error) => Err(error),
    }
}

/// The object's size.
pub async fn get_scale(client: &Client, kind: &ApiResource, key: &Key) -> Result<Scale, Error> {
    let path = format!("{}/scale", kind.object(key));
    let value = client.request(Method::GET, &path, None).await?;
    serde_json::from_value(value).map_err(|source| Error::Decode { request: format!("GET {path}"), source })
}

/// Writes the object's size.
pub async fn update_scale(
    client: &Client,
    kind: &ApiResource,
    key: &Key,
    scale: &Scale,
) -> Result<(), Error> {
    let path = format!("{}/scale", kind.object(key));
    let body = serde_json::to_value(scale).map_err(Error::Encode)?;
    client.request(Method::PUT, &path, Some(&body)).await.map(drop)
}

/// `deployments.apps`, as messages name a kind.
pub fn group_resource(kind: &ApiResource) -> String {
    match kind.group.as_str() {
        "" => kind.plural.clone(),
        group => format!("{}.{group}", kind.plural),
    }
}
